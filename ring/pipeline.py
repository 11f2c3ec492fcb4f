"""Several compressed allreduces in a row, so that the wire works while codecs do.

One helper thread makes all collective calls, in an order that is the same on every rank; the
calling thread encodes and decodes. Two exchanges are under way at a time:

    wire    start 0, start 1, finish 0, start 2, finish 1, start 3, finish 2, ...
    codec            reduce 0, reduce 1, decode 0, reduce 2, decode 1, ...
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from ringlet.ring.compressed import Exchange, run


def run_pipelined(exchanges: Sequence[Exchange]) -> int:
    """Run ``exchanges`` of one communicator, overlapping; return the bytes this rank sent.

    Collective: all ranks pass the same exchanges in the same order. No other thread may use the
    communicator meanwhile. After an error some of the exchanges are complete, and no output is
    half-written; the communicator should be closed.
    """
    if len(exchanges) == 1:
        return run(exchanges[0])
    with ThreadPoolExecutor(1, "ringlet wire") as wire:
        try:
            _overlap(wire, exchanges)
        except BaseException:
            wire.shutdown(wait=True, cancel_futures=True)
            raise
    return sum(exchange.sent for exchange in exchanges)


def _overlap(wire: ThreadPoolExecutor, exchanges: Sequence[Exchange]) -> None:
    started = [wire.submit(exchange.start) for exchange in exchanges[:2]]
    before: tuple[Exchange, Future[None]] | None = None  # finishing
    for i, exchange in enumerate(exchanges):
        started[i].result()
        exchange.reduce()
        finished = wire.submit(exchange.finish)
        if i + 2 < len(exchanges):
            started.append(wire.submit(exchanges[i + 2].start))
        if before is not None:
            before[1].result()
            before[0].decode()
        before = exchange, finished
    if before is not None:
        before[1].result()
        before[0].decode()

"""Which bucket goes first, and whether exchanges overlap with the rest of backward."""

import time

import numpy as np

from ringlet.compressors import parse
from ringlet.fusion import Engine, Limits, Request
from ringlet.fusion.recording.events import Quiet
from ringlet.ring.control.opening import open_control
from ringlet.ring.transports.local import run_local

N = 2000


class Order(Quiet):
    def __init__(self):
        self.encoded, self.done, self.overlapping = [], [], 0

    def encoding(self, owner, step, bucket):
        self.encoded.append(bucket.members[0].request.name)

    def bucket_done(self, event):
        self.done.append(event.spans[-1].end)


def with_engines(size, body):
    def rank_main(comm):
        engine = Engine(comm, open_control, Limits(fusion_threshold=4 * N))
        order = Order()
        engine.extensions.observe(order)
        engine.extensions.settle()
        try:
            return body(engine, order)
        finally:
            engine.shutdown()

    return run_local(rank_main, size)


def declare(engine):
    requests = [Request(f"layer{i}", shape=(N,)) for i in range(5)]
    return engine.declare("g", requests, [parse("none")] * 5, [{} for _ in requests])


def test_of_several_ready_buckets_the_first_layers_go_first():
    def body(engine, order):
        group = declare(engine)

        def submit():  # on the engine's thread, so that all are ready before it looks
            for i in (4, 2, 0, 3, 1):
                group.submit(f"layer{i}", np.ones(N, np.float32))

        engine.extensions.call_soon(submit)
        engine.extensions.settle()
        group.wait(60)
        return order.encoded

    expected = [f"layer{i}" for i in range(5)]
    assert with_engines(2, body) == [expected, expected]


def test_buckets_are_exchanged_while_backward_goes_on():
    def body(engine, order):
        group = declare(engine)
        for i in reversed(range(5)):
            group.submit(f"layer{i}", np.ones(N, np.float32))
            time.sleep(0.2)
            last = time.perf_counter()
        group.wait(60)
        return sum(done < last for done in order.done)

    assert min(with_engines(2, body)) >= 4

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
        self.encoded, self.done = [], []

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
        group, exchanged = declare(engine), []
        limit = time.monotonic() + 60
        for i in reversed(range(5)):
            while len(order.done) < 4 - i and time.monotonic() < limit:
                time.sleep(0.001)
            exchanged.append(len(order.done))
            group.submit(f"layer{i}", np.ones(N, np.float32))
        group.wait(60)
        return exchanged

    assert with_engines(2, body) == [[0, 1, 2, 3, 4]] * 2

"""What was applied and what is held back are the exact sum of gradients, whoever comes or goes.

In the end ranks reduce zeros, with a compressor that loses nothing: what they held back comes out.
"""

import numpy as np
import pytest
from engines import with_engines

from ringlet.compressors import parse
from ringlet.compressors.states import carry_over, merged, owed, resize, take_over
from ringlet.fusion import Request
from ringlet.ring import ReduceOp

N = 6000
WHOLE = "lossless(dtype='fp32') | ef"
CASES = [(ReduceOp.AVERAGE, 1.0), (ReduceOp.AVERAGE, 0.5), (ReduceOp.SUM, 1.0)]


class Training:
    """Ranks that reduce gradients with ``spec``, and what ought to have become of them."""

    def __init__(self, size, spec, op, predivide):
        self.spec, self.op, self.predivide = spec, op, predivide
        self.states = [{} for _ in range(size)]
        self.applied, self.exact, self.step = np.zeros(N), np.zeros(N), 0

    @property
    def compressor(self):
        return parse(self.spec)

    @property
    def averages(self):
        return self.op is ReduceOp.AVERAGE

    @property
    def size(self):
        return len(self.states)

    def go_on(self, steps=4, zeros=False):
        first, self.step = self.step, self.step + steps
        gradients = [
            [np.random.default_rng([rank, step]).standard_normal(N) for rank in range(self.size)]
            for step in range(first, self.step)
        ]
        narrow = np.array(gradients, np.float32) * (not zeros)
        collective = "scatter_reduce" if self.spec.startswith("int") else "auto"
        request = Request(
            "w", shape=(N,), spec=self.spec, op=self.op, collective=collective,
            prescale=1 / self.predivide, postscale=self.predivide,
        )  # fmt: skip

        def body(engine):
            state, total = self.states[engine.rank], np.zeros(N)
            group = engine.declare("model", [request], [self.compressor], [state])
            for each in narrow:
                out = each[engine.rank].copy()
                group.submit("w", out)
                group.wait(60)
                total += out
            return total

        total, *others = with_engines(self.size, body)
        assert all(np.array_equal(total, other) for other in others)
        self.applied += total
        whole = narrow.astype(np.float64).sum(axis=(0, 1))
        self.exact += whole / self.size if self.averages else whole

    def resize(self, after, lost=()):
        copies = [
            owed(self.states[rank], self.compressor, self.size, self.averages, self.predivide)
            for rank in lost
        ]
        before = self.size
        left = [state for rank, state in enumerate(self.states) if rank not in lost]
        for state in left:
            resize(state, self.compressor, before, after, self.averages, True, self.predivide)
        for copy in copies:
            take_over(left[0], self.compressor, copy, before, after, self.averages)
        self.states = left + [{} for _ in range(after - len(left))]

    def change(self, spec):
        how = self.size, self.averages, self.predivide
        told = [carry_over(state, self.compressor, parse(spec), *how) for state in self.states]
        assert told == [[]] * self.size
        self.spec = spec

    def restart(self, size):
        how = size, self.averages, self.predivide
        one, told = merged(self.states, self.spec, self.compressor, *how)
        assert told == []
        step = {"step": self.step}
        self.states = [{k: np.copy(v) for k, v in one.items()} | step for _ in range(size)]

    def check(self):
        """Check that what is held back comes out once, and nothing else."""
        missing = np.linalg.norm(self.exact - self.applied)
        assert missing > 0.01 * np.linalg.norm(self.exact)  # or there is nothing to see
        self.change(WHOLE)
        self.go_on(1, zeros=True)
        assert np.linalg.norm(self.exact - self.applied) < 2e-6 * np.linalg.norm(self.exact)


@pytest.fixture(params=CASES, ids=["mean", "predivided mean", "sum"])
def case(request):
    return request.param


@pytest.fixture(params=["int4 | ef", "onebit | ef", "topk(ratio=0.1) | ef"])
def spec(request):
    return request.param


def test_ranks_are_lost_with_a_copy_and_come(spec, case):
    training = Training(4, spec, *case)
    training.go_on()
    training.resize(3, lost=[1])
    training.go_on()
    training.resize(4)
    training.go_on()
    training.check()


@pytest.mark.parametrize("size", [3, 4])
def test_another_spec(spec, case, size):
    training = Training(size, spec, *case)
    training.go_on()
    training.change("int8(bucket=64) | ef")
    training.go_on(2)
    training.change(spec)
    training.go_on()
    training.check()


@pytest.mark.parametrize(("before", "after"), [(4, 3), (3, 4), (4, 2)])
def test_a_checkpoint_of_other_ranks(spec, case, before, after):
    training = Training(before, spec, *case)
    training.go_on()
    training.restart(after)
    training.go_on()
    training.check()


def test_one_rank_is_left_and_gives_back_what_both_held_back(spec, case):
    training = Training(2, spec, *case)
    training.go_on()
    training.resize(1, lost=[1])
    (state,) = training.states
    training.applied += state["residual"].astype(np.float64) * training.predivide
    missing = np.linalg.norm(training.exact - training.applied)
    assert missing < 2e-6 * np.linalg.norm(training.exact)


def test_survivors_that_keep_residuals_as_they_are_owe_to_means_what_they_did_of_sums(case):
    training = Training(3, "int4 | ef", *case)
    training.go_on()
    own = sum(state["residual"].astype(np.float64) for state in training.states)
    for state in training.states:
        resize(state, training.compressor, 3, 4, training.averages, False, training.predivide)
    training.states.append({})
    if training.averages:  # four ranks give each residual less weight than three did
        training.exact += own * training.predivide * (1 / 4 - 1 / 3)
    training.check()

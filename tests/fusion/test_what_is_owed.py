"""What was applied and what is held back are the exact sum of gradients, whoever comes or goes.

In the end ranks reduce zeros, with a compressor that loses nothing: what they held back comes out.
"""

from itertools import product

import numpy as np
import pytest
from engines import on_hosts, with_engines

from ringlet.compressors import parse
from ringlet.compressors.states import carry_over, merged, owed, resize, take_over
from ringlet.fusion import CompressionFailed, Request
from ringlet.fusion.codecs.bucket_codec import BucketCodec
from ringlet.fusion.planning import pieces
from ringlet.ring import ReduceOp

N = 6000
WHOLE = "lossless(dtype='fp32') | ef"
CASES = [(ReduceOp.AVERAGE, 1.0), (ReduceOp.AVERAGE, 0.5), (ReduceOp.SUM, 1.0)]
SPECS = ["int4 | ef", "onebit | ef", "topk(ratio=0.1) | ef"]


class Training:
    """Ranks that reduce gradients with ``spec``, and what ought to have become of them.

    They are on ``hosts``, a letter for each rank, or on one level.
    """

    def __init__(self, size, spec, op, predivide, hosts=""):
        self.spec, self.op, self.predivide, self.hosts = spec, op, predivide, hosts
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

        if self.hosts:
            total, *others = on_hosts(self.hosts, body)
        else:
            total, *others = with_engines(self.size, body)
        assert all(np.array_equal(total, other) for other in others)
        self.applied += total
        whole = narrow.astype(np.float64).sum(axis=(0, 1))
        self.exact += whole / self.size if self.averages else whole

    def resize(self, after, lost=(), hosts=""):
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
        self.states, self.hosts = left + [{} for _ in range(after - len(left))], hosts

    def change(self, spec):
        how = self.size, self.averages, self.predivide
        told = [carry_over(state, self.compressor, parse(spec), *how) for state in self.states]
        assert told == [[]] * self.size
        self.spec = spec

    def restart(self, size, hosts=""):
        how = size, self.averages, self.predivide
        one, told = merged(self.states, self.spec, self.compressor, *how)
        assert told == []
        step = {"step": self.step}
        self.states = [{k: np.copy(v) for k, v in one.items()} | step for _ in range(size)]
        self.hosts = hosts

    def check(self):
        """Check that what is held back comes out once, and nothing else."""
        missing = np.linalg.norm(self.exact - self.applied)
        assert missing > 0.01 * np.linalg.norm(self.exact)  # or there is nothing to see
        self.change(WHOLE)
        self.go_on(1, zeros=True)
        assert np.linalg.norm(self.exact - self.applied) < 2e-6 * np.linalg.norm(self.exact)


NAMED = ["mean", "predivided mean", "sum"]


@pytest.fixture(params=CASES, ids=NAMED)
def case(request):
    return request.param


@pytest.fixture(params=SPECS)
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


def there_and_back(training, spec):
    """Train, with another spec, and with ``spec`` again; check what is owed."""
    training.go_on()
    training.change("int8(bucket=64) | ef")
    training.go_on(2)
    training.change(spec)
    training.go_on()
    training.check()


@pytest.mark.parametrize("size", [3, 4])
def test_another_spec(spec, case, size):
    there_and_back(Training(size, spec, *case), spec)


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


# -- over two levels ------------------------------------------------------------------------------

HOSTS = ["aabb", "aabbcc", "aaabbb"]


@pytest.fixture
def pieces_of(request, monkeypatch):
    if request.param == "in pieces":
        monkeypatch.setattr(pieces, "PIECE", 1000)


def on_hosts_in_every_way(ways):
    """Parametrise by every case of each of ``ways``, whole and in pieces; specs take turns.

    Each spec meets each way, whole and in pieces, and each case.
    """
    params = []
    for numbers in product(range(len(ways)), range(len(CASES)), range(2)):
        hosts, case, cut = ways[numbers[0]], numbers[1], ("whole", "in pieces")[numbers[2]]
        spec = SPECS[sum(numbers) % len(SPECS)]
        name = f"{cut}-{spec}-{NAMED[case]}-{hosts if isinstance(hosts, str) else '-'.join(hosts)}"
        params.append(pytest.param(cut, spec, CASES[case], hosts, id=name))
    names = ("pieces_of", "spec", "case", "hosts")
    return pytest.mark.parametrize(names, params, indirect=["pieces_of"])


@on_hosts_in_every_way(HOSTS)
@pytest.mark.usefixtures("pieces_of")
def test_ranks_on_several_hosts_are_lost_with_a_copy_and_come(spec, case, hosts):
    size = len(hosts)
    training = Training(size, spec, *case, hosts)
    training.go_on()
    training.resize(size - 1, lost=[1])
    training.go_on()
    training.resize(size, hosts=hosts)
    training.go_on()
    training.check()


@on_hosts_in_every_way(HOSTS)
@pytest.mark.usefixtures("pieces_of")
def test_another_spec_over_two_levels(spec, case, hosts):
    there_and_back(Training(len(hosts), spec, *case, hosts), spec)


@pytest.mark.parametrize(("before", "after"), [("aabb", "aab"), ("aabbcc", "aabb"), ("ab", "aabb")])
def test_a_checkpoint_of_other_hosts_and_ranks(spec, case, before, after):
    training = Training(len(before), spec, *case, before)
    training.go_on()
    training.restart(len(after), after if after != "aab" else "")
    training.go_on()
    training.check()


@on_hosts_in_every_way(
    [("aabb", "abab"), ("aaabbb", "aabbcc"), ("aabbcc", "aaabbb"), ("aabb", ""), ("", "aabb")]
)
@pytest.mark.usefixtures("pieces_of")
def test_as_many_ranks_on_other_hosts(spec, case, hosts):
    before, after = hosts
    training = Training(len(before or after), spec, *case, before)
    training.go_on()
    training.hosts = after
    training.go_on()
    training.check()
    if after == "":
        assert not any(key.startswith("shard") for state in training.states for key in state)


def test_what_ranks_on_several_hosts_owe_counts_once_where_they_keep_it_as_it_is(case):
    training = Training(6, "int4 | ef", *case, "aabbcc")
    training.go_on()
    own, how = np.zeros(N), (6, training.averages, training.predivide)
    for state in training.states:
        parts = {key: dict(part) for key, part in state.items() if key != "step"}
        for part in parts.values():
            assert {key for key in part if key.startswith("stage2.")}
            for key in part.keys() - {"residual"}:
                del part[key]
        own += owed(parts, training.compressor, *how)["residual"]
    for state in training.states:
        resize(state, training.compressor, 6, 7, training.averages, False, training.predivide)
    training.states.append({})
    training.hosts = ""
    if training.averages:
        training.exact += own * training.predivide * (1 / 7 - 1 / 6)
    training.check()


@pytest.mark.parametrize("spec", ["int8 | ef21", "topk(ratio=0.2) | ef21"])
def test_ef21_begins_anew_with_the_ranks_that_it_knows_no_means_of(spec):
    training = Training(4, spec, ReduceOp.AVERAGE, 1.0, "aabb")
    training.go_on()
    training.hosts = "abab"  # of which the first rank has the shard that it had
    training.go_on()  # and compares what ranks have


def test_what_is_paid_back_stays_owed_where_the_exchange_fails(monkeypatch):
    training = Training(4, "topk(ratio=0.1) | ef", ReduceOp.AVERAGE, 1.0)
    training.go_on()
    training.hosts = "aabb"
    decode, left = BucketCodec.decode_sum_into, [1]

    def failing(codec, part, payloads):
        if codec.members[0].rank == 1 and left:
            left.clear()
            raise RuntimeError("it failed once")
        decode(codec, part, payloads)

    monkeypatch.setattr(BucketCodec, "decode_sum_into", failing)
    owed_then = sum(state["residual"].astype(np.float64) for state in training.states)
    with pytest.raises(CompressionFailed):
        training.go_on(1)
    assert not left
    kept = sum(state["residual"].astype(np.float64) for state in training.states)
    np.testing.assert_array_equal(kept, owed_then)


@pytest.mark.parametrize(("before", "after"), [(4, 3), (2, 4)])
@pytest.mark.parametrize("spec", ["int8 | ef21", "int8(bucket=64) | hadamard | ef21"])
@pytest.mark.parametrize("case", [*CASES, (ReduceOp.SUM, 0.5)], ids=[*NAMED, "predivided sum"])
def test_what_ef21_knows_of_the_result_is_that_of_other_ranks_too(case, spec, before, after):
    training = Training(before, spec, *case)
    training.go_on()
    training.restart(after)
    training.applied, training.exact = np.zeros(N), np.zeros(N)
    training.go_on(2)
    missing = np.linalg.norm(training.exact - training.applied)
    assert missing < 0.05 * np.linalg.norm(training.exact)

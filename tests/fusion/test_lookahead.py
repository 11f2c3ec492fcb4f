"""The look-ahead as a pure function: nothing lost, order kept, budgets kept."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from ringlet.fusion.planning.lookahead import SMALL, pack


@dataclass(frozen=True)
class Item:
    number: int
    stream: str
    nbytes: int

    @property
    def encoded(self):
        return self.stream == "int8"

    @property
    def summed(self):
        return self.stream != "int8"


queues = st.lists(
    st.tuples(st.sampled_from(["fp16", "fp32", "int8"]), st.integers(0, 100)), max_size=60
).map(lambda pairs: [Item(i, stream, n) for i, (stream, n) in enumerate(pairs)])
thresholds = st.integers(1, 300)
budgets = st.one_of(st.none(), st.integers(0, 300))
earlies = st.booleans()


def kind(item, threshold):
    """What an item shares with those whose order it keeps: large plain ones travel alone."""
    return item.stream, item.nbytes > threshold and not item.encoded


@given(queues, thresholds, budgets, earlies)
def test_nothing_is_lost_or_repeated(queue, threshold, budget, early):
    packed = [item for bucket in pack(queue, threshold, budget, early) for item in bucket]
    assert sorted(packed, key=lambda item: item.number) == queue


@given(queues, thresholds, budgets, earlies)
def test_a_stream_keeps_its_order(queue, threshold, budget, early):
    packed = [item for bucket in pack(queue, threshold, budget, early) for item in bucket]
    for stream in {kind(item, threshold) for item in queue}:
        numbers = [item.number for item in packed if kind(item, threshold) == stream]
        assert numbers == sorted(numbers)


def is_small(bucket, threshold):
    return sum(item.nbytes for item in bucket) * SMALL < threshold


@given(queues, thresholds, budgets, earlies)
def test_buckets_are_pure_and_within_the_threshold(queue, threshold, budget, early):
    for bucket in pack(queue, threshold, budget, early):
        assert len({item.stream for item in bucket}) == 1
        within = sum(item.nbytes for item in bucket) <= threshold
        beyond = bucket[-1].encoded and is_small(bucket[:-1], threshold)
        assert len(bucket) == 1 or within or beyond


@given(queues, thresholds, budgets, earlies)
def test_the_head_of_the_queue_never_waits(queue, threshold, budget, early):
    left = list(queue)
    for bucket in pack(queue, threshold, budget, early):
        assert bucket[0] == left[0]
        left = [item for item in left if item not in bucket]


@given(queues, thresholds, budgets, earlies)
def test_the_scan_stays_within_its_budget(queue, threshold, budget, early):
    left = list(queue)
    allowed = threshold if budget is None else budget
    for bucket in pack(queue, threshold, budget, early):
        passed, taken = 0, []
        for item in left[: left.index(bucket[-1])]:
            if item in bucket:
                taken.append(item)
            else:
                passed += item.nbytes
                assert passed <= allowed or (allowed > 0 and is_small(taken, threshold))
        left = [item for item in left if item not in bucket]


@given(queues, thresholds, st.one_of(st.none(), st.integers(1, 300)))
def test_a_small_bucket_is_followed_by_none_that_it_could_take(queue, threshold, budget):
    buckets = pack(queue, threshold, budget)
    for number, bucket in enumerate(buckets):
        own = kind(bucket[0], threshold)
        later = [b[0] for b in buckets[number + 1 :] if kind(b[0], threshold) == own]
        if later and is_small(bucket, threshold):
            assert not later[0].encoded
            assert sum(item.nbytes for item in bucket) + later[0].nbytes > threshold


@given(queues, thresholds)
def test_without_look_ahead_a_change_of_type_breaks_the_bucket(queue, threshold):
    in_order = [item for bucket in pack(queue, threshold, 0) for item in bucket]
    assert in_order == queue


def test_small_tensors_pass_a_large_one_that_travels_uncopied():
    sizes = [1, 1, 500, 1, 90, 500]
    plain = [Item(i, "fp32", n) for i, n in enumerate(sizes)]
    assert [[i.number for i in b] for b in pack(plain, 100)] == [[0, 1, 3, 4], [2], [5]]
    encoded = [Item(i, "int8", n) for i, n in enumerate(sizes)]
    assert [[i.number for i in b] for b in pack(encoded, 100)] == [[0, 1, 2], [3, 4], [5]]


@given(st.lists(st.integers(0, 100), min_size=1, max_size=60), st.integers(100, 300))
def test_what_is_added_up_begins_early(sizes, threshold):
    queue = [Item(i, "fp32", n) for i, n in enumerate(sizes)]
    first, usual = (pack(queue, threshold, early=which)[0] for which in (True, False))
    assert first == usual[: len(first)]
    rest = [item for item in queue if item not in first]
    if first != usual:
        assert not is_small(first, threshold)
        assert not is_small(rest, threshold)
    if not is_small(rest, threshold):
        assert is_small(first[:-1], threshold)  # the last made it large enough
    encoded = [Item(i, "int8", n) for i, n in enumerate(sizes)]
    assert pack(encoded, threshold, early=True) == pack(encoded, threshold)


def test_a_model_of_one_bucket_sends_its_last_layers_early():
    queue = [Item(i, "fp32", 3) for i in range(10)]
    assert len(pack(queue, 64)) == 1
    assert [len(b) for b in pack(queue, 64, early=True)] == [2, 8]
    assert [len(b) for b in pack(queue[:3], 64, early=True)] == [3]  # one more would not pay
    assert len(pack([Item(i, "int8", 3) for i in range(10)], 64, early=True)) == 1


def test_it_halves_the_transactions_of_an_interleaved_queue():
    queue = [Item(i, "fp16" if i % 2 else "fp32", 10) for i in range(100)]
    assert len(pack(queue, 1000, 0)) == 100
    assert len(pack(queue, 1000)) == 2

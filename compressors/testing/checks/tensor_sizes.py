"""Checks of size: tensors that are large, and tensors that fill no whole number of blocks."""

from __future__ import annotations

import tracemalloc
from contextlib import suppress

import numpy as np

from ringlet.compressors.base.contract import Compressor
from ringlet.compressors.core.context import Array, State
from ringlet.compressors.testing.checks.many_steps import check_sent_at_all
from ringlet.compressors.testing.checks.training import with_feedback
from ringlet.compressors.testing.tools.inputs import LARGE, far_apart, gaussian, large
from ringlet.compressors.testing.tools.named_check import PURE, needs
from ringlet.compressors.testing.tools.plugin_code import lengths_named
from ringlet.compressors.testing.tools.simulate import by_payload, context, encode, simulate

_STEPS = 8
_PART = 1 << 18  # elements of a large tensor that are looked at together
_RARELY = 2000  # steps in which an element is sent that is sent at random
_MANY = 100
_SHARE = 0.05  # of what comes of an element in the middle: what comes of the last at least
_GROUP, _LIKE = 200, 0.25  # values that can be compared, and the cosine that they have at least
# About where indices of 8 and of 16 bits end.
_WIDER = (255, 256, 257, 258, 65535, 65536, 65537, 65538)
# Beyond what 16 bits count, and beyond the integers that float32 holds.
_TURNS = 34
# By how much more a part may lose: a rotation of values and padding spreads errors unevenly.
_FARES = 3
_LATE = 70_000  # a step behind most warm-ups and schedules
_BLOCKS = ((1 << 22) + 40_000, (1 << 22) + 1)
_PAGES = 1 << 20  # elements: a whole number of what most work in
_TEMPORARY = 64  # times the memory of a tensor that a call may take besides
_LARGE = ((200_000, 150_000), ((1 << 24) + 40_000, 1 << 24))


@needs(*PURE, "points_the_same_way")
def check_large_tensors(compressor: Compressor) -> None:
    """Embeddings have hundreds of millions of elements: an index that is too narrow puts a gradient
    elsewhere, in silence.

    Send indices as uint32, or relative to a block with the block's number; where the distance to
    the next index is sent, send a stop in between where it does not fit; its code, such as 65535,
    must not stand for a distance as well. Add indices up in int64.
    """
    # Rounds exchange no payload that indices could ride in.
    for n, start in _LARGE if by_payload(compressor) else _LARGE[:1]:
        values = gaussian((n - start) // 2, 1)
        sent, likeness = 0, 0.0
        for step in range(1, _TURNS):  # in each of which it may be another part's turn
            sent, elsewhere, likeness = _arrived(compressor, n, start + 1, values, step)
            if sent or elsewhere:
                break
        if not sent:  # it may be that hardly anything ever is
            lost = _arrived(compressor, n, 1, values)[0] > _MANY
        else:  # of m values in any order the cosine is about 1 / sqrt(m)
            lost = likeness < min(4 / np.sqrt(sent), 0.9)
        assert sent or elsewhere or not lost, (
            f"of {n} elements, of which only those behind element {start} are not 0, none is sent: "
            "the zeros before them are taken in their place, or an index is too narrow"
        )
        assert not lost, (
            f"of {n} elements, those behind element {start} decode to something else: an index or "
            "a count is too narrow"
        )
        if not sent or sent > 0.9 * values.size or _is_dense(compressor):
            break  # there are no indices, then, or too few to be seen
    if sent > 0.9 * values.size and not elsewhere and _numbers_blocks(compressor):
        # What is not 0 may go in blocks, of which more are needed before a number is too wide.
        usual, (_, elsewhere, likeness) = likeness, _arrived(compressor, *_BLOCKS, values)
        assert likeness > 0.5 * usual or not elsewhere, (
            f"of {_BLOCKS[0]} elements, those behind element {_BLOCKS[1]} decode to something "
            "else: the number of a block is too narrow"
        )
    if not by_payload(compressor) or not _spreads(compressor):
        _check_no_float_counts(compressor)
    if by_payload(compressor) and not _spreads(compressor):
        _check_distances(compressor)


def _check_no_float_counts(compressor: Compressor) -> None:
    """Raise AssertionError where the places of values are floats, which do not count far enough."""
    n = _LARGE[0][0]
    x, places = np.zeros(n, np.float32), np.arange(n - 199, n, 2)
    x[places] = gaussian(places.size, 1)
    for what, array in _exchanged(compressor, x):
        floats = array.dtype.kind == "f" and array.itemsize < 8 and array.size >= places.size
        if not floats or array.size >= n:
            continue
        assert not np.isin(places, array).all(), (
            f"{what} holds indices as {array.dtype}, which has no odd numbers beyond "
            f"{1 << (np.finfo(array.dtype).nmant + 1)}: send int64, or uint32 in a payload"
        )


def _exchanged(compressor: Compressor, x: Array) -> list[tuple[str, Array]]:
    """Return what a single rank sends of ``x``, and what that is called."""
    if by_payload(compressor):
        payload = encode(compressor, x, context(x, step=1))
        return [(f"payload array {name!r}", array) for name, array in payload.items()]
    found = list[tuple[str, Array]]()
    run = compressor.at(1).exchange(x, np.empty_like(x), context(x, step=1))
    with suppress(StopIteration):
        asked = next(run)
        while True:
            found.append((f"what round {len(found) + 1} exchanges", asked.values.copy()))
            asked = run.send(asked.values.copy())
    return found


def _is_dense(compressor: Compressor) -> bool:
    """Whether each element has a code, though all but one are zero: none has an index, then."""
    if not by_payload(compressor):
        return False
    x = np.zeros(_LARGE[0][0], np.float32)
    x[x.size // 2] = 1
    payload = encode(compressor, x, context(x, step=1))
    return any(array.size >= x.size for array in payload.values())


def _numbers_blocks(compressor: Compressor) -> bool:
    """Whether narrow integers come with a large part that is not 0, but not one for each value."""
    if not by_payload(compressor) or compressor.traits().fixed_size:
        return False
    (n, start), _ = _LARGE
    x = np.zeros(n, np.float32)
    x[start:] = gaussian(n - start, 1)
    payload = encode(compressor, x, context(x, step=1))
    narrow = [each for each in payload.values() if each.dtype.kind in "iu" and each.itemsize < 4]
    return any(1 < each.size < n - start for each in narrow)


def _spreads(compressor: Compressor) -> bool:
    """Whether one element comes out in others too: there is a mean or a sketch, and no index."""
    x = np.zeros(1000, np.float32)
    x[500] = 1
    out = simulate(compressor, [x], step=1)[0]
    return bool(np.delete(out, 500).any()) and bool(np.count_nonzero(out) < x.size)


def _check_distances(compressor: Compressor) -> None:
    """Raise AssertionError where values arrive elsewhere that lie just too far behind others."""
    x, groups = far_apart()
    out = np.zeros(x.size)
    try:
        for step in range(1, _TURNS):  # in each of which it may be another part's turn
            came = simulate(compressor, [x], step=step)[0]
            out = np.where(out == 0, came, out)
            counts = [np.count_nonzero(out[places]) for places in groups.values()]
            if max(counts) < _GROUP or min(counts) >= max(counts) / 2:
                break
    except Exception as error:
        distances = ", ".join(str(distance) for distance in groups)
        error.add_note(f"There are entries that lie {distances} elements behind the one before.")
        raise
    if np.count_nonzero(out) > 0.9 * out.size:
        return  # zeros come out as something, too: there are no indices
    arrived = {distance: np.flatnonzero(out[places]) for distance, places in groups.items()}
    most = max(came.size for came in arrived.values())
    if most < _GROUP:
        return  # too few to compare
    for distance, places in groups.items():
        came = arrived[distance]
        assert came.size >= most / 2, (
            f"of 400 values {came.size} arrive that lie {distance} elements behind others, {most} "
            "elsewhere: that distance is taken for another"
        )
        given, got = x[places][came].astype(np.float64), out[places][came]
        likeness = float(got @ given) / float(np.linalg.norm(got) * np.linalg.norm(given))
        assert likeness > _LIKE, (
            f"values that lie {distance} elements behind others decode to something else: that "
            "distance is taken for another"
        )


def _arrived(
    compressor: Compressor, n: int, first: int, values: Array, step: int = 1
) -> tuple[int, int, float]:
    """Send n elements, zeros but for every second one from ``first`` on.

    Returns how many of those arrive, how many of the others are not zero any more, and the cosine
    of what the first were and what they became.
    """
    x, places = np.zeros(n, np.float32), slice(first, first + 2 * values.size, 2)
    x[places][: values.size] = values[: x[places].size]
    whole = simulate(compressor, [x], step=step)[0]
    out = whole[places].astype(np.float64)
    arrived = int(np.count_nonzero(out))
    given = np.where(out != 0, x[places], 0).astype(np.float64)
    lengths = float(np.linalg.norm(out) * np.linalg.norm(given))
    likeness = float(out @ given) / lengths if lengths else 0.0
    return arrived, int(np.count_nonzero(whole)) - arrived, likeness


@needs(*PURE, "points_the_same_way", "non_finite_stays_visible", "large_tensors")
def check_every_part_of_a_large_tensor(compressor: Compressor) -> None:
    """A tensor of some millions of elements must fare no worse at its end than at its beginning:
    who works in chunks, or counts buckets, comes to a last chunk and to more than 65536 buckets.

    Go on to the end, x.size, and number buckets by int64, or reshape x into one row for each. Where
    each value is coded by how it differs from the one before, errors add up: begin anew every so
    many values, or take the difference from what was decoded. Where nothing is left over, x[:-rest]
    is empty: write x[:x.size - rest].
    """
    for n in sorted({_PAGES, *lengths_named(compressor)}):
        _check_length(compressor, n)
        if n != _PAGES and 2 * n < LARGE:
            _check_length(compressor, 2 * n)
    if not by_payload(compressor):
        return
    if not compressor.traits().fixed_size and not _is_dense(compressor):
        return  # there are indices, of which another check knows
    # Where sizes vary nothing is laid out by buckets, of which there might be too many.
    n = LARGE if compressor.traits().fixed_size else 5 * _PART + 3
    x, parts = large()[:n].copy(), n // _PART
    got: Array | None = None
    for step in range(1, _TURNS):  # in each of which it may be another part's turn
        out = simulate(compressor, [x], step=step)[0]
        got = out if got is None else np.where(got == 0, out, got)
        along, off = _by_part(x, got, parts)
        if (off <= _FARES * off.min() + 1e-9).all() and (along >= 0.5 * along.max()).all():
            break
    least, share = float(off.min()), float(along.max())
    for part in range(parts):
        start = part * _PART
        assert off[part] <= _FARES * least + 1e-9, (
            f"of {n} elements, those from {start} on lose {off[part]:.3g} of their energy, "
            f"others no more than {least:.3g}: a chunk is left out, or a number is too narrow"
        )
        assert along[part] >= 0.5 * share, (
            f"of {n} elements, those from {start} on come out {along[part]:.3g} times as large "
            f"as they were, others {share:.3g} times: a chunk is left out"
        )


def _check_length(compressor: Compressor, n: int) -> None:
    """Raise AssertionError where so many elements lose much more than one more or one fewer do."""
    got: dict[int, Array] = {}
    for step in range(1, _TURNS):  # in each of which it may be another part's turn
        fared: list[tuple[float, float]] = []
        for length in (n, n + 1, n - 1):
            x = large()[:length].copy()
            out = simulate(compressor, [x], step=step)[0]
            got[length] = np.where(got[length] == 0, out, got[length]) if length in got else out
            (along,), (off,) = _by_part(x, got[length], 1, length)
            fared.append((float(along), float(off)))
            # What begins at a length does to that one what it does to one of the two beside it.
            as_well = fared[0][0] >= 0.5 * fared[-1][0] and fared[0][1] <= 2 * fared[-1][1] + 1e-9
            if as_well and length != n:
                return
    (share, lost), *beside = fared
    raise AssertionError(
        f"{n} elements lose {lost:.3g} of their energy and come out {share:.3g} times as large, "
        f"{n - 1} and {n + 1} lose {max(off for _, off in beside):.3g} at most and come out "
        f"{min(along for along, _ in beside):.3g} times as large or more: look at what is done "
        "where a tensor fills its pages, or is just as long as a limit in the code"
    )


def _by_part(x: Array, out: Array, parts: int, each: int = _PART) -> tuple[Array, Array]:
    """Return of each part how much of it arrives, and how much of its energy is lost."""
    along, off = np.zeros(parts), np.zeros(parts)
    for part in range(parts):
        places = slice(part * each, (part + 1) * each)
        given, lost = x[places], x[places] - out[places]
        energy = given @ given
        along[part] = given @ out[places] / energy
        off[part] = lost @ lost / energy
    return along, off


@needs(*PURE, "points_the_same_way", "the_last_element_counts", "large_tensors")
def check_indices_are_wide_enough(compressor: Compressor) -> None:
    """A narrower type of indices for shorter tensors saves bytes, and loses the last element where
    it is chosen for one length too many.

    The largest index is x.size - 1: 8 bits do for 256 elements, 16 bits for 65536.
    """
    for n in _WIDER:
        if _counts(compressor, n, n - 1, 0):
            continue
        # What is kept at random may have been left out in this step; a sketch loses others as well.
        places = range(n // 16, n - 1, n // 16)
        others = all(any(_counts(compressor, n, p, s) for s in range(3)) for p in places)
        last = any(_counts(compressor, n, n - 1, step) for step in range(1, _STEPS))
        if not last and compressor.traits().stateful:  # whose turn it is may be remembered
            last = any(_came(compressor, n, n - 1, step, step) > 0 for step in range(1, _STEPS))
        assert last or not others, f"the last one of {n} elements comes back as another, or never"


@needs(*PURE, "points_the_same_way", "every_element_has_its_turn", "both_signs_arrive")
def check_the_last_element_counts(compressor: Compressor) -> None:
    """Blocks and bytes are rarely full at the end of a tensor: what lies there is a gradient too.

    Round numbers of blocks up: -(-n // block), and send at least one entry: max(1, k). The last
    block has a scale of its own.
    """
    granule = _block(compressor)
    whole = () if compressor.traits().granularity is None else (granule,)
    for n in (*range(9, 18), *whole, granule + 1, granule + 9, 3 * granule - 1):
        _check_last(compressor, n)
    wrapped = compressor if compressor.traits().stateful else with_feedback(compressor)
    if compressor.traits().scales and wrapped.traits().stateful:
        check_sent_at_all(wrapped, 1)


@needs("the_last_element_counts", "late_steps_and_large_seeds")
def check_the_last_element_counts_later(compressor: Compressor) -> None:
    """What begins after a number of steps, such as a phase behind a warm-up, comes to the end of a
    tensor as well.

    Look at what is done from that step on: round numbers of blocks up, -(-n // block).
    """
    for n in (13, _block(compressor) + 9):
        _check_last(compressor, n, _LATE)


def _check_last(compressor: Compressor, n: int, first: int = 0) -> None:
    """Raise AssertionError where the last one of ``n`` elements is lost in steps from ``first``."""
    when = f", from step {first} on" * bool(first)
    middle = [_came(compressor, n, n // 2, first + step) for step in range(_STEPS)]
    # What is kept at random may be kept rarely, and in the middle together with others.
    tries = _RARELY if sum(came > 0 for came in middle) >= _STEPS // 2 else 0
    last, enough = 0.0, _SHARE * max(middle)
    for step in range(tries):
        last = max(last, _came(compressor, n, n - 1, first + step))
        if last > enough:
            break
    for turn in range(1, _TURNS if tries and compressor.traits().stateful else 0):
        if last > enough:
            break
        # Whose turn it is may be remembered.
        last = max(last, _came(compressor, n, n - 1, first + turn, turn))
    assert last > 0 or not tries, f"the last one of {n} elements is lost{when}"
    if tries and last <= enough:  # some rotate the last few by themselves
        granule = _block(compressor)
        start = (n - 1) // granule * granule
        places = ((start + n) // 2 for _ in range(_STEPS))
        last = max(_came(compressor, n, p, first + step) for step, p in enumerate(places))
    assert last > enough or not tries, (
        f"5 comes out as {max(middle):.3g} in the middle of {n} elements that are smaller, and "
        f"as {last:.3g} at their end{when}: the last block has another's scale"
    )


def _counts(compressor: Compressor, n: int, place: int, step: int) -> bool:
    """Whether an element that stands out comes back with its sign, however small."""
    return _came(compressor, n, place, step) > 0


def _came(compressor: Compressor, n: int, place: int, step: int, before: int = 0) -> float:
    """Return what of an element comes back that stands out; 0 or less where its sign does not.

    There were so many steps ``before``.
    """
    x = gaussian(n, step, 1e-3)
    came = []
    for value in (5, -5):
        states: list[State] = [{}]
        for earlier in range(before):
            simulate(compressor, [gaussian(n, earlier, 1e-3)], states, earlier)
        x[place] = value
        came.append(simulate(compressor, [x], states, step)[0][place])
    return float(min(came[0], -came[1]))


@needs(*PURE, "points_the_same_way", "the_last_element_counts")
def check_padding_does_not_leak(compressor: Compressor) -> None:
    """The last block of a tensor is filled up with zeros to be computed: if they count in its scale
    or its mean, the values there come out too small or too coarse.

    Leave padding out of mean, min and norm: divide by how many values there are, and pad with a
    value that is there, such as the last one, before min or max.
    """
    block = _block(compressor)
    single = _lost(compressor, gaussian(block, 3)) <= 0.05  # a code of single values
    # More of the same kind: what repeats itself is nothing to a code that goes by frequencies.
    sizes: list[tuple[int, tuple[int, ...], float]] = []
    sizes.append((block // 2, (block, 2 * block, 3 * block), 0.05))
    # Blocks may be shorter. Of few values the one that is left out may be a large share.
    sizes.append((block // 8, (block, 2 * block, 3 * block), 0.2))
    if compressor.traits().granularity is None:  # or longer
        sizes.append((block // 2, (64 * block, 128 * block), 0.05))
    for few, many, room in sizes:
        signs = np.where(gaussian(many[-1], 1) < 0, -1, 1).astype(np.float32)
        # Levels of a norm of the whole tensor lie elsewhere for twice the values: that is no leak.
        part, whole = _part_and_whole(compressor, signs, few, many)
        assert whole > 0.5 or part <= 4 * whole + room, _leak(few, part, whole)
        near = (100 + np.abs(gaussian(many[-1], 2))).astype(np.float32)
        if single:
            part, whole = _part_and_whole(compressor, near, few, many)
            assert part <= 100 * whole + 1e-9, _leak(few, part, whole)


def _part_and_whole(
    compressor: Compressor, x: Array, few: int, many: tuple[int, ...]
) -> tuple[float, float]:
    """Return what so few of ``x`` lose of their energy, and what so many do at most."""
    return _lost(compressor, x[:few]), max(_lost(compressor, x[:n]) for n in many)


def _leak(few: int, part: float, full: float) -> str:
    return (
        f"{few} elements lose {part:.3g} of their energy, several times as many of the kind "
        f"{full:.3g}: what fills a block up leaks into it"
    )


def _lost(compressor: Compressor, x: Array) -> float:
    """Return ||C(x) - x||^2 / ||x||^2, of which a selection may take its share anywhere."""
    lost = [
        np.square(simulate(compressor, [x], step=step)[0] - x.astype(float)).sum()
        for step in range(4)
    ]
    return float(np.mean(lost) / np.square(x, dtype=float).sum())


def _block(compressor: Compressor) -> int:
    """Return a number of elements that fills whole blocks, as far as is known."""
    granule = compressor.traits().granularity or 64
    return granule if granule >= 8 and granule % 2 == 0 else 64


@needs(*PURE)
def check_fits_beside_its_tensor(compressor: Compressor) -> None:
    """The largest layer of a model may take a tenth of the memory: a plugin that takes a hundred
    times as much meanwhile ends the run there, and was quick with small ones.

    Compare with levels one after the other, or by np.searchsorted, and not with all of them in a
    table of values times levels; cut what needs such a table into parts of some thousand values.
    """
    n = (1 << 17) + 3
    x = gaussian(n, 1)
    simulate(compressor, [x])  # which compiles, and makes what is kept
    traced = tracemalloc.is_tracing()
    if not traced:
        tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        begun, _ = tracemalloc.get_traced_memory()
        simulate(compressor, [x])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        if not traced:
            tracemalloc.stop()
    times = (peak - begun) / x.nbytes
    assert times <= _TEMPORARY, (
        f"a call takes {times:.0f} times the memory of its tensor, of {n} elements, for a while"
    )


CHECKS = (
    check_fits_beside_its_tensor,
    check_large_tensors,
    check_every_part_of_a_large_tensor,
    check_the_last_element_counts,
    check_the_last_element_counts_later,
    check_indices_are_wide_enough,
    check_padding_does_not_leak,
)

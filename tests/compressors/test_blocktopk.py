"""Top-k inside blocks, against float64 NumPy."""

import hashlib
import math
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ringlet.compressors import CompressorError, OptionError, PayloadError, parse
from ringlet.compressors.sparsifiers.dct import cosines
from ringlet.compressors.testing import check_compressor
from ringlet.compressors.testing.tools.simulate import context, decode, encode

SPECS = [
    "block_topk(ratio=0.1, block=64)",
    "block_topk(ratio=0.3, block=100, bits=16)",
    "block_topk(ratio=0.02, block=300, bits=8)",
    "block_topk(ratio=0.05, block=5000, bits=2)",
    "block_topk(ratio=0.07, block=257, bits=2)",
    "block_topk(ratio=1.0, block=33, bits=8)",
    "block_topk(ratio=0.25, block=64, dct=True)",
    "block_topk(ratio=0.2, block=37, bits=2, dct=True)",
    "block_topk(ratio=0.2, block=37, bits=8, dct=True)",
]
PLAIN = [spec for spec in SPECS if "dct" not in spec]
array_code = types.ModuleType("array_code")  # NumPy under a name that no kernel is chosen for
array_code.__dict__.update(vars(np))

seeds = st.integers(0, 2**32 - 1)
every_float = st.floats(width=32, allow_nan=True, allow_infinity=True)
finite = st.floats(-(2.0**100), 2.0**100, width=32)
lengths = st.sampled_from([0, 1, 36, 37, 64, 99, 100, 257, 700, 4999, 5000, 5001, 12345])


def vectors(elements, longest=700):
    return hnp.arrays(np.float32, st.integers(0, longest), elements=elements)


def same(a, b):
    """Whether the bits agree, any NaN being as good as another."""
    if a.dtype.kind == "f":
        np.testing.assert_array_equal(a, b)
        return a.shape == b.shape
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


def picks(compressor, payload, n):
    """Return the indices that a payload holds, block by block, unpacked in plain Python."""
    block, width, found, at = compressor.block, compressor.width, [], 0
    for start in range(0, n, block):
        size = min(block, n - start)
        k = compressor.kept if compressor.dct else math.ceil(compressor.kept * size / block)
        nbytes = math.ceil(k * width / 8)
        word = int.from_bytes(payload["indices"][at : at + nbytes].tobytes(), "little")
        found.append([(word >> (width * j)) & ((1 << width) - 1) for j in range(k)])
        at += nbytes
    assert at == payload["indices"].size
    return found


@pytest.mark.parametrize(
    "spec",
    [
        "block_topk(ratio=0.1, block=64)",
        "block_topk(ratio=0.1, block=64, bits=8) | ef",
        "block_topk(ratio=0.25, block=64, bits=2, dct=True) | ef",
        "block_topk(ratio=0.25, block=128) | int8",
    ],
)
def test_conformance(spec):
    check_compressor(spec)


@pytest.mark.parametrize("spec", SPECS)
@given(x=vectors(every_float), step=st.integers(0, 3))
@settings(max_examples=40)
def test_kernels_are_array_code_bit_for_bit(spec, x, step):
    compressor = parse(spec)
    if compressor.dct and not np.isfinite(x).all():
        x = np.nan_to_num(x, nan=1.0, posinf=2.0, neginf=-3.0)  # NaN sums have any bits
    reference, fast = compressor.compress(x, context(x)), encode(compressor, x, context(x))
    assert reference.keys() == fast.keys()
    assert all(same(reference[name], fast[name]) for name in fast)
    out = np.empty(x.size, np.float32)
    compressor.decompress(fast, out, context(x, xp=array_code))
    np.testing.assert_array_equal(decode(compressor, fast, x.size, context(x)), out)


@pytest.mark.parametrize("spec", ["block_topk", "block_topk(ratio=0.2)", *SPECS])
@given(n=lengths, seed=seeds, rounded=st.booleans())
@settings(max_examples=25)
def test_large_and_odd_lengths_agree_too(spec, n, seed, rounded):
    x = np.random.default_rng(seed).standard_t(3, n).astype(np.float32)
    x = np.rint(2 * x) if rounded else x
    compressor, fast, slow = parse(f"{spec} | ef"), {}, {}
    for step in range(2):
        reference = compressor.compress(x, context(x, slow, step=step))
        payload = encode(compressor, x, context(x, fast, step=step))
        assert all(same(reference[name], payload[name]) for name in payload)
        assert fast["residual"].tobytes() == slow["residual"].tobytes()


@pytest.mark.parametrize("spec", PLAIN)
@given(x=vectors(every_float))
@settings(max_examples=40)
def test_every_block_sends_its_largest(spec, x):
    compressor = parse(spec)
    block, bits = compressor.block, x.view(np.uint32) & 0x7FFFFFFF
    chosen = picks(compressor, encode(compressor, x, context(x)), x.size)
    assert len(chosen) == math.ceil(x.size / block)
    for b, inside in enumerate(chosen):
        piece = bits[b * block : (b + 1) * block].astype(np.int64)
        order = np.lexsort((np.arange(piece.size), -piece))  # by magnitude, then by index
        assert inside == sorted(order[: len(inside)].tolist())


def test_a_full_block_sends_a_fixed_number_and_a_short_one_its_share():
    compressor = parse("block_topk(ratio=0.015)")
    assert compressor.kept == 61
    assert [p.elements for p in compressor.layout(4096)] == [92, 61]
    assert [p.elements for p in compressor.layout(4097)] == [92 + 2, 62]
    assert compressor.layout(3 * 4096)[1].elements == 183
    assert parse("block_topk(ratio=0.29, block=100)").kept == 29
    assert parse("block_topk(ratio=0.001, block=64)").kept == 1


@given(x=vectors(finite))
def test_values_of_32_bits_are_exact_and_of_16_nearly(x):
    for bits, allowed in (32, 0.0), (16, 2.0**-8):
        compressor, ctx = parse(f"block_topk(ratio=0.2, block=50, bits={bits})"), context(x)
        out = decode(compressor, encode(compressor, x, ctx), x.size, ctx).astype(np.float64)
        sent = out != 0
        error, size = np.abs(out - x)[sent], np.abs(x[sent].astype(np.float64))
        assert (error <= allowed * size + (bits == 16) * 2.0**-134).all()


@given(x=vectors(st.floats(-(2.0**100), 2.0**100, width=32)))
def test_values_of_8_bits_are_within_half_a_level(x):
    compressor, ctx = parse("block_topk(ratio=0.2, block=50, bits=8)"), context(x)
    payload = encode(compressor, x, ctx)
    out = decode(compressor, payload, x.size, ctx).astype(np.float64)
    for b, inside in enumerate(picks(compressor, payload, x.size)):
        values = x[b * 50 : (b + 1) * 50][inside].astype(np.float64)
        level = np.abs(values).max() / 127
        error = np.abs(out[b * 50 : (b + 1) * 50][inside] - values)
        assert (error <= 0.5 * level * (1 + 2.0**-6) + 1.5e-36).all()


@given(x=vectors(st.floats(-(2.0**100), 2.0**100, width=32)))
def test_values_of_2_bits_are_means(x):
    compressor, ctx = parse("block_topk(ratio=0.4, block=50, bits=2)"), context(x)
    payload = encode(compressor, x, ctx)
    out = decode(compressor, payload, x.size, ctx).astype(np.float64)
    for b, inside in enumerate(picks(compressor, payload, x.size)):
        values = x[b * 50 : (b + 1) * 50][inside].astype(np.float64)
        size, sent = np.abs(values), out[b * 50 : (b + 1) * 50][inside]
        if size.min() < 1e-36:
            continue
        assert (np.sign(sent) == np.sign(values)).all()
        # Magnitudes that are the mean up to rounding may fall on either side.
        large = size >= size.mean() * (1 + 1e-12)
        if (large != (size >= size.mean() * (1 - 1e-12))).any():
            continue
        for group in large, ~large:
            if group.any():
                mean = size[group].mean()
                assert np.abs(np.abs(sent[group]) - mean).max() <= 2.0**-8 * mean


@pytest.mark.parametrize("spec", SPECS)
@given(n=lengths, seed=seeds, heavy=st.booleans())
@settings(max_examples=25)
def test_it_contracts_as_declared(spec, n, seed, heavy):
    rng, compressor = np.random.default_rng(seed), parse(spec)
    x = (rng.standard_t(1, n) if heavy else rng.standard_normal(n)).astype(np.float32)
    x = np.clip(x, -1e15, 1e15)
    out = decode(compressor, encode(compressor, x, context(x)), n, context(x)).astype(np.float64)
    energy, lost = np.square(x.astype(np.float64)).sum(), np.square(out - x).sum()
    assert compressor.traits().delta > 0
    assert lost <= (1 - compressor.traits().delta) * energy


@pytest.mark.parametrize("spec", SPECS)
@given(n=st.integers(0, 700), seed=seeds, at=st.integers(0, 10))
@settings(max_examples=20)
def test_cutting_at_blocks_changes_nothing(spec, n, seed, at):
    x = np.random.default_rng(seed).standard_normal(n).astype(np.float32)
    compressor = parse(spec)
    cut = min(at * compressor.block, n)
    whole = encode(compressor, x, context(x))
    left = encode(compressor, x[:cut], context(x))
    right = encode(compressor, x[cut:], context(x, offset=cut))
    for name in whole:
        assert np.concatenate([left[name], right[name]]).tobytes() == whole[name].tobytes()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("spec", SPECS)
def test_overflow_is_seen_and_not_remembered(spec, bad):
    compressor, state = parse(f"{spec} | ef"), {}
    rng = np.random.default_rng(0)
    for step in range(4):
        x = rng.standard_normal(650).astype(np.float32)
        if step == 2:
            x[[3, 649]] = bad
        ctx = context(x, state, step=step)
        out = decode(compressor, encode(compressor, x, ctx), 650, ctx)
        assert np.isfinite(out).all() == (step != 2)
        assert np.isfinite(state["residual"]).all()


@pytest.mark.parametrize("n", [16, 64, 100, 512])
def test_the_transform_is_orthonormal(n):
    rows, columns = cosines(n)
    assert (columns == rows.T).all()
    wide = rows.astype(np.float64)
    assert np.abs(wide @ wide.T - np.eye(n)).max() < 1e-6
    place = (2 * np.arange(n) + 1) * np.pi / (2 * n)
    np.testing.assert_allclose(wide[1], np.sqrt(2 / n) * np.cos(place), atol=1e-7)


def test_the_transform_is_the_same_where_cosines_are_rounded_otherwise(monkeypatch):
    """Ranks whose libraries differ in the last bit must hold the same parameters."""
    cosine = np.cos
    for library in (
        cosine,
        lambda x: np.nextafter(cosine(x), 2),
        lambda x: np.nextafter(cosine(x), -2),
    ):
        monkeypatch.setattr(np, "cos", library)
        cosines.cache_clear()
        bits = b"".join(cosines(n)[0].tobytes() for n in (16, 50, 64, 511))
        assert hashlib.sha256(bits).hexdigest()[:16] == "df5d97e6abd06fa3"


@pytest.mark.parametrize("n", [16, 37, 64, 100])
def test_the_transform_is_rounded_correctly(n):
    """As far as float64 of another origin can tell: exact cosines lie beside few of its numbers."""
    rows, _ = cosines(n)
    place, frequency = 2 * np.arange(n)[None, :] + 1, np.arange(n)[:, None]
    turns = place * frequency % (4 * n) / np.longdouble(4 * n)
    wide = np.cos(2 * np.arctan2(np.longdouble(0), np.longdouble(-1)) * turns)
    wide *= np.sqrt(np.longdouble(2) / n)
    wide[0] = np.sqrt(np.longdouble(1) / n)
    wide[turns * 4 == 1] = wide[turns * 4 == 3] = 0  # that pi is none
    np.testing.assert_array_equal(rows, wide.astype(np.float32))


@given(seed=seeds, n=st.sampled_from([64, 128, 100, 700]))
@settings(max_examples=20)
def test_keeping_every_coefficient_is_the_identity(seed, n):
    x = np.random.default_rng(seed).standard_normal(n).astype(np.float32)
    compressor, ctx = parse("block_topk(ratio=1.0, block=64, dct=True)"), context(x)
    out = decode(compressor, encode(compressor, x, ctx), n, ctx)
    np.testing.assert_allclose(out, x, atol=4e-6)


def test_a_cosine_takes_one_coefficient():
    x = np.tile(np.cos((2 * np.arange(64) + 1) * np.pi * 5 / 128), 3).astype(np.float32)
    compressor, ctx = parse("block_topk(ratio=0.01, block=64, dct=True)"), context(x)
    payload = encode(compressor, x, ctx)
    assert picks(compressor, payload, x.size) == [[5], [5], [5]]
    np.testing.assert_allclose(decode(compressor, payload, x.size, ctx), x, atol=1e-6)


@pytest.mark.parametrize("spec", ["block_topk(ratio=0.1, block=100)", *SPECS[6:7]])
def test_indices_beyond_the_block_are_refused(spec):
    compressor, x = parse(spec), np.ones(40, np.float32)
    payload = encode(compressor, x, context(x))
    payload["indices"][:] = 255
    for method in compressor.decompress, compressor.accumulate:
        with pytest.raises(PayloadError, match="beyond"):
            method(payload, np.zeros(40, np.float32), context(x))


def test_only_plain_values_can_be_chained_and_large_blocks_not_transformed():
    names = [part.name for part in parse("block_topk | int8").layout(5000)]
    assert names == ["indices", "values.codes", "values.scales"]
    with pytest.raises(CompressorError, match="nothing can be chained"):
        parse("block_topk(bits=16) | int8")
    with pytest.raises(OptionError, match="at most 512"):
        parse("block_topk(dct=True)")

"""Lossless coding by CUDA kernels on the host: byte for byte that of the CPU."""

import numpy as np
import pytest

from ringlet.compressors import Context, PayloadError, Workspace, parse
from ringlet.compressors.kernels.cuda.dense import lossless

RNG = np.random.default_rng(41)
SPECS = ["lossless", "lossless(dtype='fp32')"]
MANY = lossless.BLOCK * lossless.GROUPED  # elements of a group


@pytest.fixture(scope="module", autouse=True)
def compiled(host):
    programs = [lossless.program(0, exact, add) for exact in (0, 1) for add in (0, 1)]
    host.prepare([*programs, lossless.program(1, False), lossless.program(2, False)])


def awkward(n):
    """Return blocks that take every width, with exponents that have to be sent apart."""
    x = RNG.standard_normal(n).astype(np.float32)
    x[RNG.random(n) < 0.01] = 0
    x[700::997], x[800::1501], x[5::2003] = np.nan, -np.inf, 1e-42
    spread = np.repeat([0.5, 2, 6, 13, 28, 100], 512)[:n]
    x[: spread.size] = 1.9 * np.exp2(-RNG.random(spread.size) * spread)
    return x


def context(n, xp=np):
    return Context(name="w", numel=n, shape=(n,), xp=xp)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("n", [0, 1, 511, 513, 5000])
def test_payloads_and_what_they_decode_to_are_those_of_the_cpu(spec, n, host):
    c, x, reads = parse(spec), awkward(n), host.reads
    made, found = c.compress(x, context(n)), c.compress(x, context(n, host.module))
    assert host.reads == reads + 1, "the host waits once"
    assert list(made) == list(found), "in another order, the bytes that travel differ"
    for name in made:
        assert made[name].dtype == found[name].dtype, name
        assert made[name].tobytes() == found[name].tobytes(), name
    if n == 5000:
        assert set(made["widths"].tolist()) == {0, 2, 3, 4, 5, 8}
        assert made["spares"].size
    outs = []
    for xp in np, host.module:
        out, added = np.full(n, 7, np.float32), np.full(n, 0.5, np.float32)
        c.decompress(made, out, context(n, xp))
        c.accumulate(made, added, context(n, xp))
        outs.append((out, added))
    assert outs[0][0].tobytes() == outs[1][0].tobytes()
    np.testing.assert_array_equal(outs[0][1], outs[1][1])
    assert host.reads == reads + 1, "decoding waits for nothing"


def test_blocks_of_many_groups_find_their_places(host):
    c, n = parse("lossless"), MANY + 700
    x = np.zeros(n, np.float32)
    x[MANY - 600 : MANY + 600] = awkward(1200)
    x[3000:8000] = awkward(5000)
    made, found = c.compress(x, context(n)), c.compress(x, context(n, host.module))
    assert all(made[name].tobytes() == found[name].tobytes() for name in made)
    out = np.empty(n, np.float32)
    c.decompress(found, out, context(n, host.module))
    expected = np.empty(n, np.float32)
    c.decompress(made, expected, context(n))
    assert out.tobytes() == expected.tobytes()


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_many_tensors_of_any_precision_share_the_launches(kind, host):
    scratch, lengths = Workspace().array, [5000, 3, 0, 600] * 9
    wide = [awkward(n) for n in lengths]
    with np.errstate(over="ignore"):
        halves = [x.astype(np.float16) for x in wide]
    if kind == 1:
        xs, wide = halves, [half.astype(np.float32) for half in halves]
    elif kind == 2:
        xs = [(x.view(np.uint32) >> 16).astype(np.uint16) for x in wide]
        wide = [(x.astype(np.uint32) << 16).view(np.float32) for x in xs]
    else:
        xs = wide
    before, reads = host.launches, host.reads
    found = lossless.encode(host, xs, False, scratch, np.empty)
    assert (host.launches, host.reads) == (before + 2 * 4, reads + 2)
    c = parse("lossless")
    for x, payload in zip(wide, found, strict=True):
        made = c.compress(x, context(x.size))
        assert all(made[name].tobytes() == payload[name].tobytes() for name in made)
    outs = [lossless.Coded(np.zeros(n, np.float32), p) for n, p in zip(lengths, found, strict=True)]
    lossless.decode(host, outs, False, False, scratch)
    for x, (out, payload) in zip(wide, outs, strict=True):
        expected = np.empty_like(out)
        c.decompress(payload, expected, context(x.size))
        assert out.tobytes() == expected.tobytes()


@pytest.mark.parametrize("spec", SPECS)
def test_a_broken_payload_reads_nothing_that_is_not_its_own(spec, host):
    c, n = parse(spec), 5000
    payload, out = c.compress(awkward(n), context(n)), np.empty(n, np.float32)
    memory = np.full(payload["codes"].size + 64, 0xFF, np.uint8)  # behind the end lies a trap
    payload["codes"] = memory[: payload["codes"].size]
    payload["widths"][:] = 8
    seen = []
    for behind in 0x00, 0xFF:
        memory[payload["codes"].size :] = behind
        c.decompress(payload, out, context(n, host.module))
        seen.append(out.tobytes())
    assert seen[0] == seen[1]
    with pytest.raises(PayloadError, match="mantissas"):
        c.decompress(payload, np.empty(n + 1, np.float32), context(n, host.module))

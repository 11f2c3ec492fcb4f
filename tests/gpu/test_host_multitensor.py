"""Many tensors a launch: the bits of one by one, and no more launches than there have to be."""

import hostdevice
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from many import (
    LENGTHS,
    RANKS,
    SPECS,
    Side,
    narrowed,
    one_by_one,
    random_values,
    shifted,
    together,
    widened,
)

from ringlet.compressors import FP16, Context, MinSize, Workspace, parse
from ringlet.compressors.core.multitensor import Decoding, Encoding, Spaced, Sum
from ringlet.compressors.kernels.cuda.common.bucketed import INPUTS


@pytest.fixture(scope="module")
def device():
    """A device on the host; the order in which threads run is tested elsewhere."""
    if hostdevice.COMPILER is None:
        pytest.skip(hostdevice.REASON)
    made = hostdevice.HostDevice(hostdevice.CACHE)
    made.module = hostdevice.array_module(made, "host_multitensor")
    found = [
        program
        for spec, kind in SPECS.items()
        for program in hostdevice.programs(
            spec, (INPUTS[kind],), (0, 1) if "server_ef" in spec else (int("ef" in spec),)
        )
    ]
    made.prepare(found)
    return made


@pytest.mark.parametrize("spec", SPECS)
@settings(max_examples=4)
@given(
    lengths=st.lists(st.sampled_from(LENGTHS), min_size=1, max_size=40),
    shift=st.integers(0, 3),
    scale=st.sampled_from([1.0, 1 / 3, -2.0]),
    post=st.sampled_from([1.0, 1 / 3]),
    seed=st.integers(0, 99),
)
@pytest.mark.filterwarnings("ignore:invalid value|overflow:RuntimeWarning")
def test_many_are_as_one_by_one(spec, lengths, shift, scale, post, seed, device):
    rng, kind = np.random.default_rng(seed), SPECS[spec]
    xs = [[shifted(np, random_values(rng, n, kind), shift) for n in lengths] for _ in range(RANKS)]
    sides = [Side(spec, kind, lengths, device.module) for _ in range(2)]
    one_by_one(sides[0], xs, scale, post)
    together(sides[1], xs, scale, post)
    for a, b in zip(sides[0].seen(), sides[1].seen(), strict=True):
        if a.dtype == np.float32:
            np.testing.assert_array_equal(a, b)
        else:
            assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("spec", SPECS)
def test_32_tensors_share_a_launch_for_any_number_of_ranks(spec, device):
    count, ranks, kind = 33, 2 if "topk" in spec else 100, SPECS[spec]
    passes = -(-count // 32)
    side = Side(spec, kind, [9] * count, device.module, ranks)
    xs = [np.ones(9, kind)] * count
    spaced = Spaced(ranks, side.received.size // ranks)
    first = side.of_ranks()[0]
    # Entries of a payload are added to those of the one before: a launch each, and one to clear.
    decoding = 1 + ranks if spec.startswith("topk") else 1
    casting = int(kind != "float32" and "topk" in spec)

    def launches(call, tensors, *how):
        before = device.launches
        call(tensors, *how)
        return device.launches - before

    encoded = [
        Encoding(x, 9, p, side.context(i)) for i, (x, p) in enumerate(zip(xs, first, strict=True))
    ]
    selecting = 12 if spec.startswith("topk") else 3 if spec.startswith("nvfp4") else 1
    storing = 2 if "dtype" in spec else 0  # residuals in fewer bits are widened and rounded
    assert launches(side.kernels.encode, encoded) == (selecting + storing) * passes
    decoded = [
        Decoding(out, p, side.context(i))
        for i, (out, p) in enumerate(zip(side.outs, first, strict=True))
    ]
    found = launches(side.kernels.decode, decoded, spaced)
    assert found == (decoding + casting) * passes
    again = [
        Encoding(None, 9, p, side.context(i, stage=2), first[i])
        for i, p in enumerate(side.payloads(side.sent))
    ]
    two = decoding if "topk" in spec else 0  # the sums lie in memory before they are selected from
    assert launches(side.kernels.encode, again, spaced) == (selecting + storing + two) * passes


@pytest.mark.parametrize(
    ("spec", "kind"),
    [("threshold(value=0.9)", "float32"), ("topk_sampled(ratio=0.1)", "float16"),
     ("sidco | min_size(0)", "uint16"), ("threshold(value=0.9) | ef", "uint16"),
     ("topk_sampled(ratio=0.1) | ef", "float32"), ("sidco | ef", "float16"),
     ("lossless", "uint16"), ("lossless(dtype='fp32')", "float32")],
)  # fmt: skip
def test_sizes_that_vary_are_waited_for_once_for_32_tensors(spec, kind, device):
    c, rng, ways = parse(spec), np.random.default_rng(5), []
    lengths = [*[5, 90, 300, 1, 40] * 6, 5, 90, 3000, 1, 7000, *[5, 90, 300, 1, 40]]
    xs = [random_values(rng, n, kind) for n in lengths]
    workspace, kernels = Workspace(), c.multi_varying(Context(xp=device.module))
    for many in (False, True):
        contexts = [
            Context(
                name=str(i), numel=n, shape=(n,), state={}, xp=device.module, workspace=workspace
            )
            for i, n in enumerate(lengths)
        ]
        outs, seen = [np.zeros(n, kind) for n in lengths], []
        for _ in range(2):
            before, pairs = device.reads, list(zip(xs, contexts, strict=True))
            if many:
                given = [Encoding(x, x.size, {}, ctx) for x, ctx in pairs]
                made = kernels.compress(given, -0.5)
                assert device.reads - before <= 2
                sums = [
                    Sum(out, [p] * 3, ctx)
                    for out, p, (_, ctx) in zip(outs, made, pairs, strict=True)
                ]
                kernels.decode(sums, 0.3)
            else:
                made = [c.compress(widened(x) * np.float32(-0.5), ctx) for x, ctx in pairs]
                for out, payload, (_, ctx) in zip(outs, made, pairs, strict=True):
                    total = np.empty(out.size, np.float32)
                    c.sum_into([payload] * 3, total, ctx)
                    out[...] = narrowed(total * np.float32(0.3), kind)
            seen += [array.copy() for payload in made for array in payload.values()]
            seen += [out.copy() for out in outs]
        ways.append(seen + [array for ctx in contexts for array in ctx.state.values()])
    for a, b in zip(*ways, strict=True):
        np.testing.assert_array_equal(a, b)


class Louder(FP16):
    """A subclass that compresses in its own way."""

    def encode_into(self, x, payload, ctx):
        payload["values"][...] = x * 2


def test_what_compresses_in_its_own_way_is_not_passed_over(device):
    ctx = Context(xp=device.module)
    assert FP16().multi_tensor(ctx) is not None
    assert FP16().multi_tensor(Context()) is None
    assert parse("lossless | ef").multi_varying(ctx) is None
    for c in (Louder(), Louder() | parse("ef"), MinSize(inner=Louder()), parse("int8 | hadamard")):
        assert c.multi_tensor(ctx) is None

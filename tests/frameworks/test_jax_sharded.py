"""Compressors as JAX's operations on three devices of one process: this file is the script, too."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.preloaded("jax")

DEVICES = 3
CODES = (
    "int8", "maxnorm(bits=3, bucket=64)", "onebit | ef", "int4 | ef(decay=0.9)",
    "block_topk(ratio=0.05)", "block_topk(ratio=0.05, bits=16, block=256) | ef",
    "maxnorm(stochastic=True)", "int4(stochastic=True) | ef", "qsgd(bits=4, bucket=64)",
    "natural", "terngrad | ef",
)  # fmt: skip
ROTATED = ("int4 | hadamard | ef", "onebit | hadamard(block=128)", "qsgd | hadamard")

if __name__ == "__main__":
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    import ringlet.jax as hvd
    from ringlet.compressors import parse
    from ringlet.compressors.testing.tools.simulate import context, encode, simulate
    from ringlet.jax.sharded.array_codecs import in_64_bits
    from ringlet.jax.sharded.codec_choice import codec_for
    from ringlet.jax.sharded.counter_random import Around

    axis, plain = PartitionSpec("data"), PartitionSpec()
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    numbers = np.random.default_rng(0)
    # What is placed as results are is compiled once.
    placed = partial(jax.device_put, device=NamedSharding(mesh, axis))

    def sharded(function, **kinds):
        return jax.jit(jax.shard_map(function, mesh=mesh, **kinds))

    def gradients(n):
        spread = np.float32(10.0) ** numbers.integers(-3, 3, size=(1, n)).astype("float32")
        return numbers.normal(size=(DEVICES, n)).astype("float32") * spread

    def alike(given, expected):
        return all(np.array_equal(row, expected, equal_nan=True) for row in np.asarray(given))


def means(*specs):
    """Means and residuals have the bits that ranks of processes have."""
    for spec in specs:
        for n in (5000,) if spec != "int4 | hadamard | ef" else (33, 4096, 5000):

            def mean(x, residual, step, spec=spec):
                made, after = hvd.sharded_mean(x[0], "data", spec, residual[0], step)
                return made[None], residual if after is None else after[None]

            run = sharded(mean, in_specs=(axis, axis, plain), out_specs=(axis, axis))
            states = [{} for _ in range(DEVICES)]
            residual = placed(jnp.zeros((DEVICES, n)))
            for step in range(3):
                given = gradients(n)
                if step == 1 and n > 40 and "topk" not in spec:
                    given[1, 37] = np.inf
                made, residual = run(placed(given), residual, step)
                expected = simulate(parse(spec), list(given), states, step)
                assert alike(made, expected[0]), (spec, n, step)
                for rank, state in enumerate(states):
                    if "residual" in state:
                        assert alike(residual[rank][None], state["residual"]), (spec, n, step)


def low_rank():
    """PowerSGD's means and states are near those of processes."""
    shapes = {"powersgd(rank=2) | ef": ((40, 50), (77,)), "powersgd(rank=5)": ((30, 5, 11),),
              "powersgd | ef(decay=0.9)": ((40, 50),)}  # fmt: skip
    for spec, each in shapes.items():
        for shape in each:
            n, state = int(np.prod(shape)), hvd.sharded_state(spec, shape, name="w", seed=3)
            every = jax.tree.map(lambda leaf: placed(jnp.stack([leaf] * DEVICES)), state)
            states = [{} for _ in range(DEVICES)]

            def reduced(x, held, step, spec=spec):
                own = jax.tree.map(lambda leaf: leaf[0], held)
                made, after = hvd.sharded_mean(x[0], "data", spec, own, step, "w", 3)
                return made[None], jax.tree.map(lambda leaf: leaf[None], after)

            run = sharded(reduced, in_specs=(axis, axis, plain), out_specs=(axis, axis))
            for step in range(4):
                given = gradients(n).reshape(DEVICES, *shape)
                if step == 2:
                    given[1].reshape(-1)[37] = np.inf
                made, every = run(placed(given), every, step)
                flat = [each.reshape(-1) for each in given]
                expected = simulate(parse(spec), flat, states, step, "w", shape, True, seed=3)[0]
                assert alike(np.asarray(made)[1:], np.asarray(made)[0])
                near = 1e-5 * np.abs(given[np.isfinite(given)]).max()
                close = partial(np.allclose, rtol=0, atol=near, equal_nan=True)
                assert close(np.asarray(made)[0].reshape(-1), expected), (spec, shape, step)
                for rank, known in enumerate(states):
                    for key in every:
                        own = np.asarray(every[key][rank])
                        wanted = known.get(key, np.zeros(n)).reshape(own.shape)
                        assert close(own, wanted), (spec, shape, step, key)


def payloads():
    """Every payload has the bytes that Numba's kernels write."""
    for spec in dict.fromkeys(
        ["fp16", "bf16", *(s.partition(" | ef")[0] for s in CODES + ROTATED)]
    ):
        inner = parse(spec)
        for n in (1, 4999):  # an odd one of many buckets, the last of which is not full
            x = gradients(n)[0]
            at = {"step": 7, "seed": 3, "name": "w", "rank": 2}
            expected = encode(inner, x, context(x, **at))
            codec, around = codec_for(inner), Around("w", 7, 3, 2)
            made = in_64_bits(jax.jit(partial(codec.encode, around=around)))(x)
            assert made.keys() == expected.keys()
            for name, array in expected.items():
                assert np.asarray(made[name]).tobytes() == array.tobytes(), (spec, n, name)


def sums():
    """Casts and plain means, in float32 and in the dtype on the wire."""
    given = gradients(5000)
    unit = np.float32(1 / DEVICES)
    for spec, dtype, first in (("none", "float32", False), ("bf16", "bfloat16", False),
                               ("fp16", "float16", True)):  # fmt: skip
        sent = np.asarray(jnp.asarray(given * unit if first else given, dtype), "float32")
        total = sent[0] + sent[1] + sent[2]
        expected = total if first else total * unit
        for reduction in ("float32", "wire"):

            def mean(x, spec=spec, reduction=reduction):
                made, _ = hvd.sharded_mean(x[0], "data", spec, reduction=reduction)
                return made[None]

            made = np.asarray(sharded(mean, in_specs=axis, out_specs=axis)(given))
            if reduction == "float32":
                assert alike(made, expected), spec
            near = {"float32": 1e-6, "bfloat16": 2e-2, "float16": 3e-3}[dtype]
            size = np.abs(given).max(0) + 1e-4
            assert (np.abs(made - expected) <= near * size).all(), (spec, reduction)


def training():
    """Sixty steps with feedback reach the target, with the same bits on all devices."""
    target = jnp.arange(6000.0).reshape(60, 100) / 6000

    def step(w, residual, noise, turn):
        grad = jax.grad(lambda w: 0.5 * ((w - target + noise[0]) ** 2).sum())(w)
        mean, after = hvd.sharded_mean(grad, "data", "int4 | hadamard | ef", residual[0], turn)
        return w - 0.2 * mean, after[None]

    train = sharded(step, in_specs=(plain, axis, axis, plain), out_specs=(plain, axis),
                    check_vma=False)  # fmt: skip
    w = jax.device_put(jnp.zeros((60, 100)), NamedSharding(mesh, plain))
    residual = placed(jnp.zeros((DEVICES, 6000)))
    for turn in range(60):
        noise = jax.random.normal(jax.random.key(turn), (DEVICES, 60, 100)) * 0.01
        w, residual = train(w, residual, placed(noise), turn)
    assert float(jnp.abs(w - target).max()) < 0.05
    shards = [np.asarray(shard.data) for shard in w.addressable_shards]
    assert all(np.array_equal(shards[0], shard) for shard in shards[1:])
    half = sharded(lambda x: hvd.sharded_mean(x, "data", "int8")[0], in_specs=axis, out_specs=axis)
    assert half(jnp.ones((DEVICES, 2000), "bfloat16")).dtype == "bfloat16"


def the_page():
    """The block of docs/jax.md steps by the mean of all devices' gradients, as it stands there."""
    text = (Path(__file__).parents[2] / "docs" / "jax.md").read_text()
    block = text.split("`sharded_mean`\n")[1].split("```python\n")[1].split("```")[0]
    w = jax.random.normal(jax.random.key(0), (64, 64))
    x = jax.random.normal(jax.random.key(1), (8 * DEVICES, 64))
    scope = globals() | {"w": w, "x": x, "loss": lambda w, x: jnp.square(x @ w).mean()}
    exec(block.replace("(4,", f"({DEVICES},"), scope | {"P": PartitionSpec}, made := {})
    expected = jax.grad(scope["loss"])(w, x)
    error = (w - made["w"]) / 0.1 - expected
    assert float(jnp.linalg.norm(error)) < 0.2 * float(jnp.linalg.norm(expected))
    assert made["residual"].shape == (DEVICES, w.size)
    assert float(jnp.abs(made["residual"]).max()) > 0


def traced_once():
    """A codec's decoding is traced once, however many devices there are."""

    def fed(x):
        return hvd.sharded_mean(x, "data", "int8 | ef")[0]

    kind, decoded = type(codec_for(parse("int8"))), []
    decode = kind.decode
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "decode", lambda *given: decoded.append(given) or decode(*given))
        sharded(fed, in_specs=axis, out_specs=axis)(jnp.ones((DEVICES, 2000)))
    assert len(decoded) == 1  # for its own residual, and for each device's payload


def mistakes():
    """What has no operations of JAX's is refused by name."""
    with pytest.raises(ValueError, match="pass what sharded_state returns"):
        sharded(lambda x, step: hvd.sharded_mean(x, "data", "powersgd", step=step)[0],
                in_specs=(axis, plain), out_specs=axis)(jnp.ones((120, 50)), 0)  # fmt: skip
    for spec in ("topk", "acpsgd", "int8 | ef21", "minmax",
                 "int8 | ef(dtype='bf16')", "block_topk(bits=8)"):  # fmt: skip
        with pytest.raises(ValueError, match="not there as operations of JAX's"):
            sharded(lambda x, s=spec: hvd.sharded_mean(x, "data", s)[0], in_specs=axis,
                    out_specs=axis)(jnp.ones((DEVICES, 2000)))  # fmt: skip
    with pytest.raises(ValueError, match="'float32' or 'wire'"):
        hvd.sharded_mean(jnp.ones(3), "data", reduction="double")


def what_is_no_row_of_floats():
    """Imaginary parts and whole numbers would be rounded away, and other residuals added."""
    for dtype, words in (
        ("complex64", r"dtype complex64.*x\.real and x\.imag.*optax\.contrib\.split_real_and_im"),
        ("int32", r"dtype int32.*jax\.lax\.psum"),
        ("bool", "dtype bool"),
    ):
        with pytest.raises(TypeError, match=words):
            sharded(lambda x: hvd.sharded_mean(x, "data")[0], in_specs=axis,
                    out_specs=axis)(jnp.ones((DEVICES, 5), dtype))  # fmt: skip
    with pytest.raises(TypeError, match=r"x is one array, not a dict: .*jax\.tree\.leaves"):
        hvd.sharded_mean({"w": jnp.ones(3)}, "data")
    for spec, residual, words in (
        ("int8 | ef", jnp.ones((1, 6)), r"of shape \(6,\), .*shape \(1, 6\)\..*residual\[0\]"),
        ("int8 | ef", jnp.ones(()), r"of shape \(6,\)"),
        ("int8 | ef", {"w": jnp.ones(6)}, r"of shape \(6,\), .*not dict"),
        ("powersgd | ef", {"residual": jnp.ones(5)}, r"of shape \(6,\), .*shape \(5,\)"),
    ):
        with pytest.raises(ValueError, match=words):
            hvd.sharded_mean(jnp.ones((2, 3)), "data", spec, residual)
    with pytest.raises(TypeError, match="the dict that sharded_state returns"):
        hvd.sharded_mean(jnp.ones((2, 3)), "data", "powersgd | ef", jnp.ones(6))
    for dtype in ("float16", "bfloat16"):
        kept = sharded(lambda x: hvd.sharded_mean(x, "data")[0], in_specs=axis, out_specs=axis)
        assert kept(jnp.ones((DEVICES, 5), dtype)).dtype == dtype


# Each is a process: together they compile for minutes.
CHECKS = {
    "means of codes": lambda: means(*CODES),
    "means of rotated codes": lambda: means(*ROTATED),
    "low rank": low_rank,
    "payloads": payloads,
    "sums, training and mistakes": lambda: (
        sums(),
        training(),
        the_page(),
        traced_once(),
        mistakes(),
        what_is_no_row_of_floats(),
    ),
}


@pytest.mark.parametrize("check", CHECKS)
def test_three_devices(check):
    # XLA's optimisations as users have them: they must not change bits.
    optimised = os.environ["XLA_FLAGS"].replace("optimization_level=0", "optimization_level=3")
    devices = f"{optimised} --xla_force_host_platform_device_count={DEVICES}"
    made = subprocess.run(
        [sys.executable, __file__, check],
        env=os.environ | {"XLA_FLAGS": devices, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert made.returncode == 0, made.stdout + made.stderr


if __name__ == "__main__":
    CHECKS[sys.argv[1]]()

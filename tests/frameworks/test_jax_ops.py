"""ringlet.jax: every collective on real ranks, eager and inside jax.jit."""

from __future__ import annotations

import traceback

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import ringlet.jax as hvd
from ringlet.jax.ops import ordered_calls, raised_errors
from ringlet.job.process_sets import InvalidArgument

pytestmark = pytest.mark.preloaded("jax", whole_end=True)

OPS = (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product)
DTYPES = ("float16", "bfloat16", "float32", "uint8", "int8", "int32")


def both(function):
    """Return the function as it is, and compiled."""
    return (function, jax.jit(function))


def case_allreduce():
    size, rank = hvd.size(), hvd.rank()
    mine = [float(r + 1) for r in range(size)]
    expected = {
        hvd.Average: sum(mine) / size,
        hvd.Sum: sum(mine),
        hvd.Min: 1.0,
        hvd.Max: float(size),
        hvd.Product: float(np.prod(mine)),
    }
    for op in OPS:
        for call in both(lambda x, op=op: hvd.allreduce(x, op=op)):
            assert call(jnp.full((2, 3), rank + 1.0)).tolist() == [[expected[op]] * 3] * 2
    for dtype in DTYPES:
        for call in both(lambda x: hvd.allreduce(x, average=False)):
            for shape in ((), (5,), (2, 0), (300, 70)) if dtype == "float32" else ((5,),):
                total = call(jnp.full(shape, rank + 1, dtype))
                assert total.dtype == dtype
                assert total.shape == shape
                assert set(np.asarray(total).astype(float).reshape(-1)) <= {sum(mine)}
    scaled = hvd.allreduce(
        jnp.ones(3), op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.25, name="scaled"
    )
    assert scaled.tolist() == [size / 2] * 3
    assert int(hvd.allreduce(3, op=hvd.Sum)) == 3 * size
    bits = hvd.allreduce(jnp.array([rank == 0, False]), op=hvd.Max)
    assert bits.tolist() == [True, False]
    one, two = jax.jit(lambda x: hvd.grouped_allreduce([x, 2 * x], op=hvd.Sum))(jnp.ones(3))
    assert (one.tolist(), two.tolist()) == ([size] * 3, [2 * size] * 3)


def case_programs_compile_once():
    """What is handed over without a copy is an array like any other, to a compiled step too."""
    for dtype in (*DTYPES, "bool"):
        small, large = hvd.broadcast_pytree([jnp.ones(3, dtype), jnp.ones((300, 500), dtype)])
        assert (small.dtype, large.dtype) == (dtype, dtype)
        step = jax.jit(lambda arrays: [~array for array in arrays])
        if dtype.startswith(("float", "bfloat")):
            step = jax.jit(lambda arrays: [array / 2 for array in arrays], donate_argnums=0)
        ones = step([small, large])
        step([ones[0], ones[1]])
        assert step._cache_size() == 1


def case_compression():
    rank, size = hvd.rank(), hvd.size()
    x = jax.random.normal(jax.random.key(rank), (4096,))
    mean = hvd.allreduce(x, name="plain")
    for spec, near in (("fp16", 1e-2), ("int8", 0.05)):
        for call in both(lambda x, c=spec: hvd.allreduce(x, compression=c, name="compressed")):
            assert np.allclose(call(x), mean, atol=near)
    sent = sum(hvd.allreduce(x, compression="int8 | ef", name="fed") for _ in range(20))
    assert np.allclose(sent / 20, mean, atol=0.01)
    low = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Max, compression="fp16"))(jnp.full(3, rank))
    assert low.tolist() == [size - 1] * 3
    with pytest.raises(ValueError, match="needs a name"):
        hvd.allreduce(x, compression="int8 | ef")


def case_order():
    """Calls of a program run in the order of tracing, whatever depends on them."""
    size, rank = hvd.size(), hvd.rank()

    @jax.jit
    def many(*arrays):
        return [hvd.allreduce(jnp.sin(a @ a), op=hvd.Sum) for a in arrays]

    given = [jnp.full((60, 60), float(i)) for i in range(24)]
    for total, a in zip(many(*given), given, strict=True):
        assert np.allclose(total, size * jnp.sin(a @ a), atol=1e-4)

    @jax.jit
    def looped(x):
        def body(carry, i):
            again = hvd.allreduce(carry, op=hvd.Sum)
            return jax.lax.cond(i > 1, lambda x: hvd.allreduce(x), lambda x: x, again), again.sum()

        return jax.lax.scan(body, x, jnp.arange(4))

    end, sums = looped(jnp.ones(3))
    assert end.tolist() == [size**4] * 3
    assert sums.tolist() == [3.0 * size**i for i in range(1, 5)]
    # A rank that compiles once more counts its calls as the others do.
    several = jax.jit(lambda x: hvd.allreduce(x[:2], op=hvd.Sum))
    for turn in range(3):
        length = 5 if rank == 0 and turn == 1 else 3
        assert several(jnp.full(length, turn)).tolist() == [turn * size] * 2
    assert float(hvd.allreduce(1.0, op=hvd.Sum)) == size


def case_gradients():
    size, rank = hvd.size(), hvd.rank()
    weights = jnp.arange(3.0) + rank
    total = sum(jnp.arange(3.0) + r for r in range(size))

    def gradients(function, x):
        loss = lambda x: (function(x) * weights).sum()  # noqa: E731
        for call in both(jax.grad(loss)):
            yield call(x)
        yield jax.jit(jax.grad(jax.checkpoint(loss)))(x)

    for got in gradients(lambda x: hvd.allreduce(x, op=hvd.Sum), jnp.ones(3)):
        assert got.tolist() == total.tolist()
    for got in gradients(lambda x: hvd.allreduce(x, name="mean"), jnp.ones(3)):
        assert np.allclose(got, total / size)
    for got in gradients(lambda x: hvd.broadcast(x, 0), jnp.ones(3)):
        assert np.allclose(got, total / size if rank == 0 else 0)
    for got in gradients(lambda x: hvd.allgather(x).reshape(size, 3), jnp.ones(3)):
        assert np.allclose(got, total / size)
    for got in gradients(lambda x: hvd.reducescatter(x, op=hvd.Sum), jnp.ones((size, 3))):
        assert got.tolist() == [(size * (jnp.arange(3.0) + r)).tolist() for r in range(size)]
    for got in gradients(hvd.alltoall, jnp.ones((size, 3))):
        assert got.tolist() == [(jnp.arange(3.0) + r).tolist() for r in range(size)]
    uneven = jax.grad(lambda x: (hvd.allgather(x) ** 2).sum())(jnp.full((rank + 1,), 2.0))
    assert uneven.tolist() == [4.0] * (rank + 1)
    with pytest.raises(LookupError, match="stop_gradient"):
        jax.grad(lambda x: hvd.allreduce(x, op=hvd.Max).sum())(jnp.ones(3))


def case_second_derivatives():
    """Gradients of collectives have gradients, in programs and outside."""
    size, rank = hvd.size(), hvd.rank()
    every = np.array([np.arange(1.0, size + 1) + r for r in range(size)], np.float32)
    x = jnp.array(every[rank])

    def second(operation):
        def penalty(x):
            return (jax.grad(lambda x: (operation(x * x) ** 2).sum())(x) ** 2).sum()

        eager, traced = (call(x) for call in both(jax.grad(penalty)))
        assert np.allclose(eager, traced)
        return eager

    # Of size * sum(s ** 2), where s is the sum of squares: 4 size s x, squared and summed.
    s = (every**2).sum(0)
    expected = 16 * size**2 * (3 * s**2 * 2 * every[rank])
    assert np.allclose(second(lambda x: hvd.allreduce(x, op=hvd.Sum)), expected)
    named = second(lambda x: hvd.grouped_allreduce([x], op=hvd.Sum, name="twice")[0])
    assert np.allclose(named, expected)
    own = 96 * every[rank] ** 5
    assert np.allclose(second(hvd.alltoall), own)  # x ** 4 on another rank: 4 x ** 3
    own *= (1 + 2 / size) / 3  # Horovod averages these gradients where they are sums
    assert np.allclose(second(hvd.allgather), own)
    assert np.allclose(second(lambda x: hvd.broadcast(x, 0)), own if rank == 0 else 0.0)


def case_what_has_no_derivative():
    transformation = hvd.reduce_gradients()
    state = transformation.init(jnp.ones(3))
    update = lambda x: transformation.update(x, state)[0].sum()  # noqa: E731
    for call in both(jax.grad(update)):
        with pytest.raises(NotImplementedError, match=r"reduce them by hvd\.grouped_allreduce"):
            call(jnp.ones(3))
    for call in both(jax.vmap(hvd.allreduce)):
        with pytest.raises(NotImplementedError, match=r"call it once for the mapped arrays"):
            call(jnp.ones(3))


def case_movements():
    size, rank = hvd.size(), hvd.rank()
    every = [[r, r] for r in range(size)]
    for call in both(hvd.allgather):
        assert call(jnp.full((1, 2), rank)).tolist() == every
    uneven = hvd.allgather(jnp.full((rank, 2), rank))
    assert uneven.tolist() == [[r, r] for r in range(size) for _ in range(r)]
    if size > 1:
        with pytest.raises(InvalidArgument, match="as many rows of every rank"):
            jax.jit(hvd.allgather)(jnp.full((1 + rank, 2), rank))
    with pytest.raises(InvalidArgument, match="without dimensions"):
        hvd.allgather(1.0)
    pair = hvd.grouped_allgather([jnp.full(1, rank), jnp.full((1, 1), rank)], name="pair")
    assert [each.size for each in pair] == [size, size]
    for dtype in DTYPES:
        for call in both(lambda x: hvd.broadcast(x, size - 1)):
            got = call(jnp.full((2, 2), rank, dtype))
            assert (got.dtype, np.asarray(got, float).tolist()) == (dtype, [[size - 1] * 2] * 2)
    for call in both(hvd.alltoall):
        assert call(jnp.arange(size) + 10 * rank).tolist() == [rank + 10 * r for r in range(size)]
    moved, received = hvd.alltoall(jnp.full(sum(range(size)), rank), list(range(size)))
    assert moved.tolist() == [r for r in range(size) for _ in range(rank)]
    assert received.tolist() == [rank] * size
    for call in both(lambda x: hvd.reducescatter(x, op=hvd.Sum)):
        rows = call(jnp.ones((2 * size + 1, 3)))
        assert rows.shape == (2 + (rank == 0), 3)
        assert set(np.asarray(rows).reshape(-1)) == {float(size)}
    first, second = hvd.grouped_reducescatter([jnp.ones(size), jnp.ones((size, 2))], name="two")
    assert (first.shape, second.shape) == ((1,), (1, 2))
    assert float(hvd.reducescatter(jnp.ones(size), compression="bf16")[0]) == 1.0


def case_trees():
    rank = hvd.rank()
    tree = {"dense": [jnp.full(3, rank), 0.5 * rank], "count": np.int32(rank)}
    assert hvd.size() == 1 or not hvd.replicas_equal(tree)
    same = hvd.broadcast_pytree(tree)
    assert same["dense"][0].tolist() == [0, 0, 0]
    assert (float(same["dense"][1]), int(same["count"])) == (0.0, 0)
    assert hvd.replicas_equal(same)
    assert hvd.broadcast_pytree({}) == {}
    if hvd.size() > 1:
        with pytest.raises(hvd.HorovodInternalError, match=r"'a' differs between ranks"):
            hvd.broadcast_pytree({"a": jnp.ones(3 + rank)})
    with pytest.raises(TypeError, match=r"array is a dict.*jax\.tree\.leaves\(tree\)"):
        hvd.allreduce({"w": jnp.ones(3)})
    with pytest.raises(TypeError, match=r"leaf 'f' is a function, 'tanh'.*equinox\.is_array"):
        hvd.broadcast_pytree({"f": jnp.tanh, "w": jnp.ones(3)})
    with pytest.raises(TypeError, match=r"leaf 's': .* not a valid JAX array type"):
        hvd.broadcast_pytree({"s": "text"})


def case_trees_of_what_no_collective_combines():
    """Keys of random numbers, as optax.add_noise has them, and numbers of all widths."""
    rank = hvd.rank()
    tree = {
        "key": jax.random.key(rank),
        "keys": jax.random.split(jax.random.key(rank, impl="rbg"), (2, 3)),
        "old": jax.random.PRNGKey(rank),
        "narrow": jnp.full((3, 2), rank, jnp.int4),
        "eight": jnp.full(5, rank, jnp.float8_e4m3fn),
        "none": jnp.zeros((0, 2), jnp.uint32),
        "complex": jnp.full((2, 2), rank + 1j, jnp.complex64),
    }
    same = hvd.broadcast_pytree(tree, root_rank=hvd.size() - 1)
    assert hvd.replicas_equal(same)
    assert hvd.size() == 1 or not hvd.replicas_equal(tree["key"])
    for name, leaf in tree.items():
        assert (same[name].dtype, same[name].shape) == (leaf.dtype, leaf.shape)
    assert jax.random.key_data(same["key"]).tolist() == [0, hvd.size() - 1]
    assert same["old"].tolist() == [0, hvd.size() - 1]
    assert same["narrow"].astype("int32").tolist() == [[hvd.size() - 1] * 2] * 3
    assert float(same["eight"][4]) == hvd.size() - 1
    assert same["complex"].tolist() == [[hvd.size() - 1 + 1j] * 2] * 2
    if hvd.size() > 1:
        with pytest.raises(hvd.HorovodInternalError, match=r"'k' differs between ranks"):
            hvd.broadcast_pytree({"k": jax.random.key(0, impl="rbg" if rank else None)})


def case_numbers_that_jax_would_wrap():
    """NumPy's of 64 bits are refused where they do not fit, as Python's are."""
    large = np.array([1, 2**40 + 1])
    for call in (*both(lambda: hvd.allreduce(large)), lambda: hvd.allgather(large)):
        with pytest.raises(OverflowError, match="array holds 1099511627777, which int32 cannot"):
            call()
    with pytest.raises(OverflowError, match="leaf 'leaf' holds 1099511627777"):
        hvd.broadcast_pytree(large)
    with pytest.raises(OverflowError, match="leaf 'n': Python int 1099511627776 too large"):
        hvd.broadcast_pytree({"n": 2**40})
    assert hvd.allgather(np.array([2**31 - 1]))[0] == 2**31 - 1


def case_errors():
    """What fails in a program is raised by its call, of its own class, alike on all ranks."""
    size, rank = hvd.size(), hvd.rank()
    if size > 1:
        texts = []
        for call in both(lambda x: hvd.allreduce(x, name="odd")):
            with pytest.raises(hvd.HorovodInternalError, match="shapes differ") as caught:
                call(jnp.ones(3 + rank))
            assert type(caught.value).__name__ == "Mismatch"
            assert traceback.extract_tb(caught.tb)[-1].filename == __file__
            texts.append(str(caught.value))
        assert len(set(hvd.allgather_object(texts.pop()))) == 1
    for turn in range(3):
        assert jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum))(float(turn)) == turn * size
    with pytest.raises(TypeError, match=r"complex64, .*split_real_and_imaginary\(optax\.chain"):
        jax.jit(hvd.allreduce)(jnp.ones(2, jnp.complex64))
    for call in both(lambda x: hvd.allreduce(x, hvd.Sum)):
        with pytest.raises(ValueError, match=r"average .* is True or False.*: write op=hvd\.Sum"):
            call(jnp.ones(3))
    with pytest.raises(ValueError, match=r"op is one of hvd\.Average, .*, not True"):
        hvd.allreduce(jnp.ones(2), op=True)
    with pytest.raises(ValueError, match="one of the ranks"):
        jax.jit(lambda x: hvd.broadcast(x, 77))(1.0)
    for refused in (hvd.barrier, hvd.join, lambda: hvd.broadcast_pytree({})):
        with pytest.raises(RuntimeError, match="once, while it is traced"):
            jax.jit(refused)()
    with pytest.raises(jax.errors.JaxRuntimeError):  # what others' callbacks raise stays as it is
        jax.block_until_ready(jax.jit(_failing)(1.0))


def case_an_interrupt_in_a_program():
    """Ctrl-C, and an exit by a signal's handler, come out as what they are."""
    total = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum))
    assert total(1.0) == hvd.size()
    for raised in (KeyboardInterrupt(), SystemExit(3)):
        odd = jax.jit(
            lambda x, e=raised: ordered_calls.call(_raising(e), [x], [("float32", ())])[0]
        )
        with pytest.raises(type(raised)) as caught:
            jax.block_until_ready(odd(1.0))
        assert caught.value.args == raised.args
    assert total(1.0) == hvd.size()


def _raising(error):
    def function(arrays, results):
        raise error

    return function


def case_a_program_whose_input_is_still_computed():
    """JAX would run it behind its caller: after eager calls, and with errors that nobody knows."""
    size, rank = hvd.size(), hvd.rank()
    turns = jax.jit(lambda a: jax.lax.fori_loop(0, 300, lambda _, a: jnp.tanh(a @ a), a))
    late = lambda: turns(jnp.full((400, 400), 1e-3))[0, 0] * (rank == 1)  # noqa: E731
    total = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum))
    assert total(jnp.ones(3) + late()).tolist() == [size] * 3
    first, second = total(jnp.ones(3) + late()), hvd.allreduce(jnp.full(3, 10.0), op=hvd.Sum)
    assert (first.tolist(), second.tolist()) == ([size] * 3, [10 * size] * 3)
    odd = jax.jit(lambda x: hvd.allreduce(x, name="late"))
    with pytest.raises(hvd.HorovodInternalError, match="shapes differ"):
        odd(jnp.ones(3 + rank) + late())
    assert total(jnp.ones(3)).tolist() == [size] * 3
    jax.effects_barrier()


def _failing(x):
    def callback(_):
        raise ValueError("mine")

    return jax.pure_callback(callback, jax.ShapeDtypeStruct((), "float32"), x)


def case_copies():
    """An older JAX, without views of XLA's memory, gives the same."""
    size, rank = hvd.size(), hvd.rank()
    primitive, ordered_calls._primitive = ordered_calls._primitive, lambda: None
    try:
        many = jax.jit(lambda x: [hvd.allreduce(x + i, op=hvd.Sum) for i in range(8)])
        for i, total in enumerate(many(jnp.zeros((300, 70)))):
            assert set(np.asarray(total).reshape(-1)) == {float(i * size)}
        assert jax.jit(hvd.allgather)(jnp.full((1,), rank)).tolist() == list(range(size))
        got = jax.jit(hvd.allreduce)(jnp.full(3, rank, "bfloat16"))
        assert np.asarray(got).dtype == ml_dtypes.bfloat16
        if size > 1:
            with pytest.raises(hvd.HorovodInternalError, match="shapes differ"):
                jax.block_until_ready(jax.jit(hvd.allreduce)(jnp.ones(3 + rank)))
    finally:
        ordered_calls._primitive = primitive


def case_what_is_no_argument():
    """A list in the place of a process set, and other libraries' keywords, in a short traceback."""
    x, pair = jnp.ones((hvd.size(), 2)), [0, 1]
    calls = {
        "allreduce": lambda **given: hvd.allreduce(x, **given),
        "grouped_allreduce": lambda **given: hvd.grouped_allreduce([x], **given),
        "allgather": lambda **given: hvd.allgather(x, **given),
        "grouped_allgather": lambda **given: hvd.grouped_allgather([x], **given),
        "broadcast": lambda **given: hvd.broadcast(x, 0, **given),
        "alltoall": lambda **given: hvd.alltoall(x, **given),
        "reducescatter": lambda **given: hvd.reducescatter(x, **given),
        "grouped_reducescatter": lambda **given: hvd.grouped_reducescatter([x], **given),
        "broadcast_pytree": lambda **given: hvd.broadcast_pytree({"x": x}, **given),
        "barrier": hvd.barrier,
        "reduce_gradients": hvd.reduce_gradients,
    }
    for name, call in calls.items():
        with pytest.raises(
            TypeError, match=r"^process_set is what add_process_set.*\[0, 1\]"
        ) as bad:
            call(process_set=pair)
        assert traceback.extract_tb(bad.tb)[-1].filename == __file__, name
        words = rf"^{name}\(\) got .*'group'; did you mean 'process_set'\? There are: "
        with pytest.raises(TypeError, match=words) as bad:
            call(group=pair)
        assert traceback.extract_tb(bad.tb)[-1].filename == __file__, name
    for given, found in (({"a": x}, "a mapping"), (x, "one of the arrays")):
        for what in ("allreduce", "allgather", "reducescatter"):
            words = rf"{what} takes a list of arrays, not {found}: pass jax\.tree\.leaves\(tree\)"
            with pytest.raises(TypeError, match=words):
                getattr(hvd, f"grouped_{what}")(given)
    for name in ("join", "replicas_equal", "residual_norm", "sharded_mean", "sharded_state"):
        with pytest.raises(TypeError, match=rf"{name}\(\) got an unexpected .*'odd'\. There are:"):
            getattr(hvd, name)(odd=1)
    if hvd.size() > 1:
        odd = jnp.ones((hvd.size(), 3 + hvd.rank()))
        made = hvd.reduce_gradients("int8 | ef")
        for call in (
            lambda: hvd.broadcast(odd, 0, name="odd"),
            lambda: hvd.allgather(odd, name="odd"),
            lambda: hvd.reducescatter(odd, name="odd"),
            lambda: hvd.broadcast_pytree(odd),
            lambda: made.init(odd),
        ):
            with pytest.raises(hvd.HorovodInternalError, match="between ranks") as bad:
                call()
            assert traceback.extract_tb(bad.tb)[-1].filename == __file__


def case_process_sets():
    rank = hvd.rank()
    pair = hvd.add_process_set([0, 2])
    if rank in (0, 2):
        for call in both(lambda x: hvd.allreduce(x, op=hvd.Sum, process_set=pair)):
            assert float(call(float(rank))) == 2.0
        assert jax.jit(lambda x: hvd.broadcast(x, 2, process_set=pair))(float(rank)) == 2.0
    hvd.barrier()
    hvd.remove_process_set(pair)


def case_join():
    size, rank = hvd.size(), hvd.rank()
    total = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum))
    for turn in range(rank + 1):
        assert total(1.0) == size - turn
    assert hvd.join() == size - 1
    assert total(1.0) == size


JOBS = [("gloo", 2), ("mpi", 3), ("alone", 1)]
# What JAX makes of a call is the same whoever and how many they are.
SIZES = {
    case_programs_compile_once: (2,),
    case_order: (2,),
    case_gradients: (2,),
    case_second_derivatives: (2,),
    case_what_has_no_derivative: (2,),
    case_copies: (2,),
    case_a_program_whose_input_is_still_computed: (2,),
    case_trees_of_what_no_collective_combines: (2,),
    case_numbers_that_jax_would_wrap: (2,),
    case_process_sets: (3,),
    case_an_interrupt_in_a_program: (1, 2),
}


def test_on_ranks(case, transport, size, run_case):
    run_case(case, transport, size)


@pytest.mark.parametrize(
    "error", [KeyError("a key of its own"), KeyboardInterrupt(), SystemExit(3), SystemExit()]
)
def test_errors_of_a_callback_are_told_once(error):
    with pytest.raises(type(error)), raised_errors.noted():
        raise error
    text = f"INTERNAL: {type(error).__name__}: {error}"
    assert raised_errors.told(jax.errors.JaxRuntimeError("INTERNAL: 3 of another's")) is None
    told = raised_errors.told(jax.errors.JaxRuntimeError(text))
    assert type(told) is type(error)
    assert (told.args, told.__traceback__) == (error.args, None)
    assert raised_errors.told(jax.errors.JaxRuntimeError(text)) is None

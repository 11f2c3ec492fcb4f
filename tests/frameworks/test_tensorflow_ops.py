"""ringlet.tensorflow: every collective on real ranks, eager and inside tf.function."""

from __future__ import annotations

import pickle
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import ringlet.tensorflow as hvd
from ringlet.ring.errors import PeerLost
from ringlet.tensorflow.ops import bridge, graph_errors

pytestmark = pytest.mark.preloaded("tensorflow", whole_end=True)

OPS = (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product)
DTYPES = ("float16", "bfloat16", "float32", "float64", "uint8", "int8", "int32", "int64")


def filled(value, *shape, dtype="float32"):
    return tf.cast(tf.fill(shape, float(value)), dtype)


def sliced(values, indices, shape):
    return tf.IndexedSlices(values, tf.constant(indices, tf.int64), tf.constant(shape, tf.int64))


def both(function):
    """Return the function as it is, and inside tf.function."""
    return (function, tf.function(function, autograph=False))


def case_overlapping():
    """What is begun in a function is waited for apart: in order, once, and with its own values."""
    size, rank = hvd.size(), hvd.rank()

    @tf.function
    def many(*tensors):
        summed = [hvd.allreduce(t, op=hvd.Sum, name=f"o{i}") for i, t in enumerate(tensors)]
        first = [hvd.broadcast(t, 0, name=f"b{i}") for i, t in enumerate(tensors)]
        return summed, first

    for turn in range(5):
        given = [filled(turn + i + rank, 50 + i) for i in range(40)]
        summed, first = many(*given)
        for i, (total, of_first) in enumerate(zip(summed, first, strict=True)):
            assert set(total.numpy()) == {size * (turn + i) + sum(range(size))}
            assert set(of_first.numpy()) == {turn + i}

    @tf.function
    def twice(x):
        return hvd.allreduce(x, op=hvd.Sum, name="same"), hvd.allreduce(
            2 * x, op=hvd.Sum, name="same"
        )

    @tf.function
    def several(x):
        total = tf.zeros_like(x)
        for i in tf.range(20):
            one, two = twice(x + tf.cast(i, tf.float32))
            total += one + hvd.allreduce(two, op=hvd.Sum)
        return total

    for _ in range(3):
        one, two = twice(filled(1, 3))
        assert (one.numpy()[0], two.numpy()[0]) == (size, 2 * size)
        total = several(filled(1, 3)).numpy()[0]
        assert total == sum((size + 2 * size * size) * (1 + i) for i in range(20))

    @tf.function
    def overwritten(variable):
        total = hvd.allreduce(variable, op=hvd.Sum)
        variable.assign_add([1.0, 1.0])
        return total

    variable = tf.Variable([0.0, 0.0])
    for turn in range(10):
        assert overwritten(variable).numpy()[0] == turn * size

    @tf.function
    def unwanted(x):
        hvd.allreduce(x, op=hvd.Sum, name="unwanted")
        return x

    if size > 1:
        with pytest.raises(tf.errors.FailedPreconditionError, match="shapes differ"):
            unwanted(filled(1, 3 + rank))
    for _ in range(3):
        unwanted(filled(1, 3))


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
            assert call(filled(rank + 1, 2, 3)).numpy().tolist() == [[expected[op]] * 3] * 2
    for dtype in DTYPES:
        for call in both(lambda x: hvd.allreduce(x, average=False)):
            for shape in ((), (5,), (2, 0), (300, 70)):
                total = call(filled(rank + 1, *shape, dtype=dtype))
                assert total.dtype == dtype
                assert total.shape == shape
                assert set(total.numpy().astype(float).reshape(-1)) <= {sum(mine)}
    scaled = hvd.allreduce(
        filled(1, 3), op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.25, name="scaled"
    )
    assert scaled.numpy().tolist() == [size / 2] * 3
    assert hvd.allreduce(3, op=hvd.Sum).numpy() == 3 * size
    assert hvd.allreduce(np.float32([rank, 1.0])).numpy()[1] == 1.0
    assert hvd.allreduce(tf.Variable([1.0]), average=False).numpy() == [size]
    bits = hvd.allreduce(tf.constant([rank == 0, False]), op=hvd.Max)
    assert bits.numpy().tolist() == [True, False]


def case_compression():
    rank, size = hvd.rank(), hvd.size()
    x = tf.random.stateless_normal([4096], [rank, 1])
    mean = hvd.allreduce(x, name="plain").numpy()
    for spec, near in (("fp16", 1e-2), ("int8", 0.05), (hvd.Compression.fp16, 1e-2)):
        for call in both(lambda x, c=spec: hvd.allreduce(x, compression=c, name="compressed")):
            assert np.allclose(call(x), mean, atol=near)
    sent = sum(hvd.allreduce(x, compression="int8 | ef", name="fed").numpy() for _ in range(20))
    assert np.allclose(sent / 20, mean, atol=0.01)
    low = hvd.allreduce(filled(rank, 3), op=hvd.Max, compression="fp16")
    assert low.numpy().tolist() == [size - 1] * 3

    class Halving(hvd.Compression.none.__mro__[1]):
        @staticmethod
        def compress(tensor):
            return tensor / 2, None

        @staticmethod
        def decompress(tensor, ctx):
            return tensor * 2

    assert hvd.allreduce(filled(3, 2), compression=Halving).numpy().tolist() == [3.0, 3.0]
    with pytest.raises(ValueError, match="needs a name"):
        hvd.allreduce(x, compression="int8 | ef")
    with pytest.raises(ValueError, match="did you mean"):
        hvd.allreduce(x, compression="int9")


def case_grouped_allreduce():
    size, rank = hvd.size(), hvd.rank()
    shapes = [(3,), (2, 2), (), (5, 1)]
    for call in both(lambda *xs: hvd.grouped_allreduce(list(xs), op=hvd.Sum, name="group")):
        results = call(*[filled(rank + 1, *shape) for shape in shapes])
        total = size * (size + 1) // 2
        assert [r.shape for r in results] == shapes
        assert all(set(r.numpy().reshape(-1)) == {total} for r in results)
    slices = sliced(filled(1, 1, 4), [rank], (size, 4))
    dense, rows = hvd.grouped_allreduce([filled(1, 2), slices], op=hvd.Sum)
    assert dense.numpy().tolist() == [size] * 2
    assert tf.convert_to_tensor(rows).numpy().tolist() == [[1.0] * 4] * size
    assert hvd.grouped_allreduce([]) == hvd.grouped_reducescatter([]) == []
    with pytest.raises(hvd.HorovodInternalError, match="at least one tensor"):
        hvd.grouped_allgather([])
    for given, found in (({"a": filled(2, 2)}, "a mapping"), (filled(2, 2), "one of the tensors")):
        for what in ("allreduce", "allgather", "reducescatter"):
            words = rf"a grouped {what} takes a list of tensors, not {found}: pass "
            words += r"tf\.nest\.flatten\(tree\)"
            with pytest.raises(TypeError, match=words):
                getattr(hvd, f"grouped_{what}")(given)


def case_many_nodes_in_one_function():
    """More collectives than TensorFlow has threads, some of them independent of each other."""
    size = hvd.size()

    @tf.function(autograph=False)
    def many(x):
        parts = [hvd.allreduce(x + i, op=hvd.Sum) for i in range(24)]
        gathered = [hvd.allgather(x * i) for i in range(8)]
        return tf.add_n(parts), tf.concat(gathered, 0)

    for _ in range(3):
        total, gathered = many(tf.ones([2]))
        assert total.numpy().tolist() == [size * (24 + sum(range(24)))] * 2
        assert gathered.shape == (8 * 2 * size,)

    @tf.function(autograph=False)
    def loop(x):
        step = lambda i, x: (i + 1, hvd.allreduce(x, op=hvd.Sum))  # noqa: E731
        return tf.while_loop(lambda i, x: i < 5, step, (0, x))[1]

    assert loop(tf.ones([2])).numpy().tolist() == [size**5] * 2


def case_allgather():
    size, rank = hvd.size(), hvd.rank()
    for call in both(lambda x: hvd.allgather(x)):
        for dtype in ("float32", "bfloat16", "int64", "bool"):
            rows = call(filled(rank, rank + 1, 2, dtype=dtype))
            expected = [
                bool(r) if dtype == "bool" else r for r in range(size) for _ in range(r + 1)
            ]
            assert rows[:, 0].numpy().tolist() == expected
    for call in both(lambda a, b: hvd.grouped_allgather([a, b], name="two")):
        rows, flat = call(filled(rank, rank + 1, 2), filled(rank, 3))
        assert rows.shape == (sum(range(1, size + 1)), 2)
        assert flat.numpy().tolist() == [r for r in range(size) for _ in range(3)]
    traced = tf.function(lambda x: hvd.allgather(x)).get_concrete_function(tf.ones([3, 7]))
    assert traced.structured_outputs.shape.as_list() == [None, 7]
    with pytest.raises(ValueError, match="without dimensions"):
        hvd.allgather(1.0)


def case_broadcast():
    size, rank = hvd.size(), hvd.rank()
    root = size - 1
    for call in both(lambda x: hvd.broadcast(x, root)):
        assert call(filled(rank, 3)).numpy().tolist() == [root] * 3
    variables = [tf.Variable(filled(rank, 2)), tf.Variable(rank)]
    hvd.broadcast_(variables, root, name="two")
    assert [v.numpy().tolist() for v in variables] == [[root] * 2, root]
    assert hvd.broadcast_([tf.Variable(rank)], root)[0].numpy() == root
    variables[0].assign([rank, rank])
    tf.function(lambda: hvd.broadcast_(variables, 0) and None, autograph=False)()
    assert variables[0].numpy().tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match="root_rank must be one of"):
        hvd.broadcast(filled(1, 1), size)


def case_unsigned_integers_move():
    size, rank = hvd.size(), hvd.rank()
    for dtype in ("uint16", "uint32", "uint64"):
        mine = tf.constant([2**15 + rank] * size, dtype)
        for call in both(lambda x: (hvd.allgather(x), hvd.broadcast(x, 1), hvd.alltoall(x))):
            everyone, from_one, exchanged = call(mine)
            assert everyone.dtype == from_one.dtype == exchanged.dtype == mine.dtype
            assert everyone.numpy().tolist() == [
                2**15 + r for r in range(size) for _ in range(size)
            ]
            assert from_one.numpy().tolist() == [2**15 + 1] * size
            assert exchanged.numpy().tolist() == [2**15 + r for r in range(size)]
    with pytest.raises(TypeError, match="dtype uint16"):
        hvd.allreduce(tf.constant([1], tf.uint16))


def case_alltoall():
    size, rank = hvd.size(), hvd.rank()
    x = tf.range(size * 2)[:, None] + 100 * rank
    for call in both(lambda x: hvd.alltoall(x)):
        expected = [100 * r + 2 * rank + i for r in range(size) for i in range(2)]
        assert call(x)[:, 0].numpy().tolist() == expected
    splits = tf.constant([(rank + r) % 3 for r in range(size)])
    y = tf.range(int(sum(splits)), dtype=tf.float32)
    for call in both(lambda y, s: hvd.alltoall(y, splits=s)):
        moved, received = call(y, splits)
        assert received.numpy().tolist() == splits.numpy().tolist()
        assert received.dtype == tf.int32
        assert len(moved) == sum(received)
    with tf.GradientTape() as tape:
        tape.watch(y)
        moved, _ = hvd.alltoall(y, splits=splits)
        loss = tf.reduce_sum(moved * (rank + 1.0))
    expected = [r + 1 for r in range(size) for _ in range((rank + r) % 3)]
    assert tape.gradient(loss, y).numpy().tolist() == expected
    with pytest.raises(RuntimeError, match="share of 3 rows"):
        hvd.alltoall(tf.ones(3), splits=[1] * (size + 1))
    with pytest.raises(ValueError, match="whole numbers"):
        hvd.alltoall(tf.ones(size), splits=tf.ones(size))
    with pytest.raises(RuntimeError, match="divide"):
        hvd.alltoall(tf.ones([size + 1, 2]))


def case_reducescatter():
    size, rank = hvd.size(), hvd.rank()
    x = tf.range(size * 3 + 1, dtype=tf.float32)[:, None] * (rank + 1)
    start = 3 * rank + min(rank, 1)
    total = sum(range(1, size + 1))
    for call in both(lambda x: hvd.reducescatter(x, op=hvd.Sum)):
        mine = call(x)[:, 0].numpy().tolist()
        assert mine == [total * (start + i) for i in range(4 if rank == 0 else 3)]
    for call in both(lambda a, b: hvd.grouped_reducescatter([a, b], op=hvd.Sum)):
        a, b = call(filled(rank, size * 2), filled(1, size, 3, dtype="bfloat16"))
        assert a.numpy().tolist() == [size * (size - 1) / 2] * 2
        assert b.numpy().tolist() == [[size] * 3]
    world = hvd.global_process_set
    for call in both(  # in the order that Horovod has
        lambda x: hvd.reducescatter(x, "", None, hvd.Sum, "placed", world, True, 0.5, 4.0)
    ):
        assert call(tf.ones([size])).numpy().tolist() == [2 * size]
    half = hvd.reducescatter(tf.ones([size, 2]), compression=hvd.Compression.fp16)
    assert half.dtype == tf.float32
    with pytest.raises(RuntimeError, match="'none', 'fp16' or 'bf16'"):
        hvd.reducescatter(tf.ones(size), compression="int8")


def case_gradients():
    """Horovod's conventions, in eager mode and in graphs."""
    size, rank = hvd.size(), hvd.rank()

    def gradient(function, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(function(x) * (rank + 1.0))
        return tape.gradient(loss, x)

    total = sum(range(1, size + 1))
    cases = [
        (lambda x: hvd.allreduce(x, op=hvd.Sum), total),
        (lambda x: hvd.allreduce(x), total / size),
        (lambda x: hvd.grouped_allreduce([x, x * 0], op=hvd.Sum)[0], total),
        (lambda x: hvd.allgather(x), total / size),
        (lambda x: hvd.grouped_allgather([x])[0], total / size),
        (lambda x: hvd.grouped_allgather([x, x > 0, tf.range(3)])[0], total / size),
        (lambda x: hvd.broadcast(x, 0), total / size if rank == 0 else 0.0),
        (lambda x: hvd.reducescatter(x, op=hvd.Sum)[: size * 2], None),
    ]
    for function, expected in cases:
        for call in both(lambda x, f=function: gradient(f, x)):
            result = call(tf.ones([size * 2])).numpy()
            shares = [(r + 1) * size for r in range(size) for _ in range(2)]
            assert result.tolist() == (shares if expected is None else [expected] * (size * 2))
    with pytest.raises(LookupError, match="op=Max has no gradient"):
        gradient(lambda x: hvd.allreduce(x, op=hvd.Max), tf.ones([2]))


def case_second_derivatives():
    """Gradients of collectives are collectives that outer tapes go through, on all ranks."""
    rank, size = hvd.rank(), hvd.size()
    x = tf.constant([1.0 + rank, 2.0 + rank])
    every = np.array([[1.0 + r, 2.0 + r] for r in range(size)])

    def second(operation):
        def penalty(x):
            with tf.GradientTape() as outer:
                outer.watch(x)
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    y = tf.reduce_sum(operation(x * x) ** 2)
                g = inner.gradient(y, x)
                total = tf.reduce_sum(g * g)
            return outer.gradient(total, x)

        eager, traced = penalty(x).numpy(), both(penalty)[1](x).numpy()
        assert np.array_equal(eager, traced)
        return eager

    # Of size * sum(s ** 2), where s is the sum of squares: 4 size s x, squared and summed.
    s = (every**2).sum(0)
    expected = 16 * size**2 * (3 * s**2 * 2 * every[rank])
    assert np.allclose(second(lambda x: hvd.allreduce(x, op=hvd.Sum)), expected)
    named = second(lambda x: hvd.grouped_allreduce([x], op=hvd.Sum, name="twice")[0])
    assert np.allclose(named, expected)
    # What only moves: x ** 4 somewhere, whose gradient is 4 x ** 3.
    own = 96 * every[rank] ** 5
    assert np.allclose(second(hvd.alltoall), own)
    assert np.allclose(second(lambda x: hvd.alltoall(x, [1] * size)[0]), own)
    # Horovod averages these gradients where they are sums: so is a part of the second.
    own *= (1 + 2 / size) / 3
    assert np.allclose(second(hvd.allgather), own)
    assert np.allclose(second(lambda x: hvd.broadcast(x, 0)), own if rank == 0 else 0.0)


def case_indexed_slices():
    size, rank = hvd.size(), hvd.rank()
    for call in both(lambda s, op=hvd.Average: hvd.allreduce(s, op=op)):
        given = sliced(filled(1, 3, 2), [size, rank, size], (size + 1, 2))
        result = call(given)
        assert result.indices.numpy().tolist() == list(range(size + 1))
        assert np.allclose(result.values[:, 0], [1 / size] * size + [2.0])
    given = sliced(filled(rank, 2, 512), [0, 3], (1000, 512))
    for spec in (None, "fp16", "int8", hvd.Compression.fp16):
        summed = hvd.allreduce(given, op=hvd.Sum, compression=spec)
        assert summed.indices.numpy().tolist() == [0, 3]
        assert np.allclose(summed.values, size * (size - 1) / 2, rtol=0.01)
    empty = sliced(tf.zeros([0, 2]), [], (4, 2))
    assert hvd.allreduce(empty).indices.shape == (0,)
    whole = hvd.allreduce(sliced(filled(3, 1, 2, dtype="int32"), [rank], (size, 2)))
    assert whole.values.numpy().tolist() == [[3 / size] * 2] * size
    with pytest.raises(NotImplementedError, match="cannot be scaled"):
        hvd.allreduce(sliced(filled(3, 1, 2, dtype="int32"), [0], (1, 2)), prescale_factor=0.5)
    for call in (hvd.allreduce, lambda s, op: hvd.grouped_allreduce([tf.ones(2), s], op=op)):
        with pytest.raises(NotImplementedError, match="op=Max"):
            call(given, op=hvd.Max)


def case_run_time_topology():
    size, rank = hvd.size(), hvd.rank()

    @tf.function(autograph=False)
    def asked():
        return hvd.size_op(), hvd.rank_op(), hvd.local_size_op(), hvd.local_rank_op()

    assert [int(n) for n in asked()] == [size, rank, hvd.local_size(), hvd.local_rank()]
    own = hvd.add_process_set([0])
    included = tf.function(lambda: hvd.process_set_included_op(own.process_set_id))
    assert int(included()) == int(rank == 0)
    assert int(hvd.size_op(own.process_set_id)) == 1
    hvd.remove_process_set(own)
    assert hvd.num_rank_is_power_2(4)
    assert not hvd.num_rank_is_power_2(6)
    with pytest.raises(ValueError, match="power of 2"):
        hvd.check_num_rank_power_of_2(3)
    assert hvd.gpu_available() in (True, False)


def case_process_sets():
    rank = hvd.rank()
    alone = hvd.add_process_set([1])
    if rank == 1:
        assert hvd.allreduce(filled(7, 2), process_set=alone, op=hvd.Sum).numpy().tolist() == [7, 7]
        assert hvd.allgather(filled(7, 2), process_set=alone).numpy().tolist() == [7, 7]
        assert hvd.broadcast_object("x", 1, process_set=alone) == "x"
        hvd.barrier(process_set=alone)
    else:
        with pytest.raises(ValueError, match="not part of"):
            hvd.allreduce(filled(7, 2), process_set=alone)
    total = sum(range(hvd.size()))
    assert hvd.allreduce(filled(rank, 1), op=hvd.Sum).numpy().tolist() == [total]
    hvd.remove_process_set(alone)


def case_join_and_barrier():
    size, rank = hvd.size(), hvd.rank()
    for _ in range(1 + rank):
        hvd.allreduce(filled(1, 3), name="uneven", op=hvd.Sum)
    assert int(hvd.join()) == size - 1
    hvd.barrier()
    tf.function(lambda: hvd.barrier(), autograph=False)()


def case_objects():
    rank, size = hvd.rank(), hvd.size()
    told = hvd.broadcast_object({"epoch": 3} if rank == size - 1 else None, size - 1)
    assert told == {"epoch": 3}
    assert hvd.broadcast_object_fn(0)([rank]) == [0]
    assert hvd.allgather_object([rank] * rank) == [[r] * r for r in range(size)]
    with pytest.raises(RuntimeError, match="would run once"):
        tf.function(lambda: hvd.broadcast_object(1), autograph=False)()
    with pytest.raises(RuntimeError, match="would run once"):
        tf.function(lambda: hvd.allgather_object(1), autograph=False)()


def case_broadcast_variables():
    rank, size = hvd.rank(), hvd.size()
    made = [
        tf.Variable(filled(rank, 3, dtype=dtype), name=f"v{i}") for i, dtype in enumerate(DTYPES)
    ]
    hvd.broadcast_variables(made, root_rank=size - 1)
    assert all(v.numpy().astype(float).tolist() == [size - 1] * 3 for v in made)
    made[0].assign(filled(rank, 3, dtype="float16"))

    @tf.function(autograph=False)
    def inside():
        hvd.broadcast_variables(made, root_rank=0)

    inside()
    assert made[0].numpy().tolist() == [0.0] * 3
    assert hvd.replicas_equal(made)
    with pytest.raises(TypeError, match=r"a list of variables, such as model\.weights, not <"):
        hvd.replicas_equal(keras.Sequential())
    for wrong in (keras.Sequential(), made[0]):
        with pytest.raises(TypeError, match=r"a list, such as model\.variables, not a "):
            hvd.broadcast_variables(wrong, 0)
    for none in (made[0].numpy(), tf.ones([3])):
        with pytest.raises(TypeError, match=r"overwrites variables, .* which a \w+ is not"):
            hvd.broadcast_variables([none], 0)
    large = tf.Variable(tf.fill([300, 301], float(rank)), name="large")
    hvd.broadcast_variables([large], root_rank=1)
    use = tf.function(lambda: tf.matmul(large, large, transpose_b=True), autograph=False)
    assert use().numpy()[0, 0] == 301.0  # what was received is aligned as kernels need it
    # Built on rank 0 and loaded on others, where Keras leaves Sequential models out.
    alike = tf.Variable(float(rank), name="dense/kernel" if rank else "sequential/dense/kernel")
    for call in both(lambda: hvd.broadcast_variables([alike], 0) and None):
        alike.assign(float(rank))
        call()
        assert alike.numpy() == 0.0
    odd = [tf.Variable(1.0, name="a"), tf.Variable(1.0, name="b")][: 2 if rank == 0 else 1]
    with pytest.raises(hvd.HorovodInternalError, match=r"'b' is there on rank\(s\) 0 but not"):
        hvd.broadcast_variables(odd, 0)
    with pytest.raises(hvd.HorovodInternalError, match="'c' differs between ranks"):
        hvd.broadcast_variables([tf.Variable(tf.ones([2 + rank]), name="c")], 0)
    with pytest.raises(RuntimeError, match=r"compat\.v1 graph"):
        hvd.broadcast_global_variables(0)


def case_adasum():
    size = hvd.size()
    same = hvd.allreduce(filled(3, 5), op=hvd.Adasum)
    assert np.allclose(same, 3.0)  # parallel: the average
    unit = tf.one_hot(hvd.rank(), size) * 2.0
    assert np.allclose(hvd.allreduce(unit, op=hvd.Adasum), 2.0)  # orthogonal: the sum


def case_bad_input():
    rank = hvd.rank()
    with pytest.raises(TypeError, match="RaggedTensor"):
        hvd.allreduce(tf.ragged.constant([[1.0], [2.0, 3.0]]))
    with pytest.raises(TypeError, match="SparseTensor"):
        hvd.allgather(tf.sparse.from_dense([[1.0]]))
    with pytest.raises(TypeError, match="dtype string"):
        hvd.allreduce(tf.constant(["text"]))
    with pytest.raises(TypeError, match="dtype complex64"):
        hvd.broadcast(tf.complex(1.0, 2.0), 0)
    with pytest.raises(TypeError, match="IndexedSlices, which only allreduce"):
        hvd.allgather(sliced(tf.ones([1, 2]), [0], (3, 2)))
    leaked = []
    tf.function(lambda x: leaked.append(x + 1), autograph=False)(tf.ones([2]))
    with pytest.raises(TypeError, match=r"graph that has been left"):
        hvd.allreduce(leaked[0])
    import keras

    with pytest.raises(TypeError, match="symbolic KerasTensor"):
        hvd.allreduce(keras.Input((3,)))
    with pytest.raises(RuntimeError, match="jit_compile=False"):
        tf.function(lambda x: hvd.allreduce(x), jit_compile=True)(tf.ones([2]))
    with pytest.raises(ValueError, match="not both"):
        hvd.allreduce(tf.ones([2]), average=True, op=hvd.Sum)
    with pytest.raises(ValueError, match=r"op is one of hvd\.Average, .*, not True"):
        hvd.allreduce(tf.ones([2]), op=True)
    with pytest.raises(hvd.HorovodInternalError, match="shapes differ between ranks"):
        hvd.allreduce(tf.ones([2 + rank]), name="mismatch")
    with pytest.raises(tf.errors.FailedPreconditionError, match="differ between ranks"):
        hvd.allgather(tf.ones([2, 2 + rank]), name="mismatch")
    with pytest.raises(tf.errors.InvalidArgumentError, match="pass splits"):
        hvd.alltoall(tf.ones([hvd.size() + 1]))
    from_nobody = lambda: hvd.broadcast(tf.ones([2]), root_rank=99)  # noqa: E731
    for call in (from_nobody, tf.function(from_nobody, autograph=False)):
        with pytest.raises(tf.errors.InvalidArgumentError, match="root_rank must be") as caught:
            call()
        ours = Path(hvd.__file__).parents[1]
        assert not [entry for entry in caught.traceback if ours in Path(entry.path).parents]
        assert caught.value.__cause__ is None
    unknown = hvd.ProcessSet([rank])
    unknown.process_set_id = 10
    with pytest.raises(ValueError, match="no process set 10"):
        tf.function(lambda: hvd.allreduce(1.0, process_set=unknown), autograph=False)()
    assert hvd.allreduce(filled(1, 2), op=hvd.Sum).numpy().tolist() == [hvd.size()] * 2


def case_operations_that_are_not_defined():
    for call in (*both(lambda x: hvd.allreduce(x)), *both(lambda x: hvd.reducescatter(x))):
        with pytest.raises(TypeError, match="booleans have no average"):
            call(tf.constant([True, False]))
    for call in both(lambda x: hvd.allreduce(x, op=hvd.Adasum)):
        with pytest.raises(TypeError, match="Adasum takes float16"):
            call(tf.constant([1, 2]))
    assert hvd.allreduce(tf.constant([True, False]), op=hvd.Sum).numpy().tolist() == [True, False]


def case_errors_out_of_a_graph():
    """What a node raises has the classes that eager calls have, and those of Horovod."""
    rank = hvd.rank()
    odd = tf.ones([2], tf.float32 if rank else tf.float64)

    def differing(x):
        return hvd.allreduce(x, name="mismatch2")

    kinds = []
    for call in both(differing):
        for horovods in (hvd.HorovodInternalError, tf.errors.FailedPreconditionError):
            with pytest.raises(horovods, match="dtypes differ between ranks") as caught:
                call(odd)
            kinds.append(caught.type)
    assert len(set(kinds)) == 1

    @tf.function(autograph=False)
    def misused(x, splits):
        return hvd.alltoall(x, splits=splits)

    with pytest.raises(hvd.HorovodInternalError) as traced:
        tf.function(differing)(odd)
    first, *rest = str(traced.value).splitlines()
    assert first.startswith("allreduce of tensor 'mismatch2': dtypes differ")
    assert rest[:2] == ["", "In a graph, traced at:"]
    assert rest[-1].endswith("in differing")
    assert len(rest) < 12

    for kind in (ValueError, hvd.HorovodInternalError, tf.errors.InvalidArgumentError):
        with pytest.raises(kind, match="share of 3 rows"):
            misused(tf.ones(3), tf.constant([1] * (hvd.size() + 1)))
    # Errors in which the classes are not told beforehand, with what they carry.
    lost = PeerLost("rank 7 went away", [7])

    def failing(_):
        raise lost

    with pytest.raises(PeerLost, match="rank 7 went away") as found:
        tf.function(lambda x: bridge.run(failing, [x], [("float32", None)]))(odd)
    assert isinstance(found.value, tf.errors.UnknownError)
    assert found.value.ranks == (7,)
    copy = pickle.loads(pickle.dumps(found.value))  # as a launcher gets it
    assert (type(copy), copy.ranks, str(copy)) == (found.type, (7,), str(found.value))

    def broken(_):
        raise MemoryError("no room for the sum")

    with pytest.raises(tf.errors.ResourceExhaustedError) as first:
        tf.function(lambda x: bridge.run(broken, [x], [("float32", None)]))(odd)
    assert str(first.value).startswith("MemoryError: no room for the sum\n\nIn a graph, traced at:")
    assert not graph_errors._failed  # nothing is left that a later error could be taken for
    # Others' errors stay what they are, also where Keras makes them anew.
    with pytest.raises(tf.errors.InvalidArgumentError, match="of another") as others:
        tf.function(lambda: tf.debugging.check_numerics([np.nan], "of another"))()
    assert not isinstance(others.value, hvd.HorovodInternalError)

    class Layer(tf.keras.layers.Layer):
        def call(self, x):
            return differing(x)

    with pytest.raises(tf.errors.FailedPreconditionError, match="dtypes differ") as inside:
        Layer(autocast=False)(odd)
    assert isinstance(inside.value, hvd.HorovodInternalError)


def case_plain_graph():
    """tf.compat.v1: sessions run independent nodes in any order."""
    size, rank = hvd.size(), hvd.rank()
    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, [None, 2])
        total = hvd.allreduce(x, op=hvd.Sum)
        rows = hvd.allgather(x)
        assert total.shape.as_list() == [None, 2]
        with tf.compat.v1.Session() as session:
            a, b = session.run([total, rows], {x: np.full((3, 2), rank + 1)})
    assert a.tolist() == [[size * (size + 1) / 2] * 2] * 3
    assert b.shape == (3 * size, 2)


def case_plain_graph_with_fewer_threads_than_collectives():
    size, rank = hvd.size(), hvd.rank()
    config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=2)
    with tf.Graph().as_default(), tf.compat.v1.Session(config=config) as session:
        x = tf.constant([1.0, 2.0])
        sums = [hvd.allreduce(x * i, op=hvd.Sum) for i in range(8)]
        (slope,) = tf.gradients(hvd.broadcast(x, 0), x, tf.ones(2))
        variable = tf.compat.v1.get_variable("v", initializer=float(rank), use_resource=False)
        session.run(variable.initializer)
        (started,) = hvd.broadcast_([variable], 1)
        wrong = hvd.allreduce(tf.ones([2 + rank]), name="graph mismatch")
        asked = [*sums, slope, started]
        order = -1 if rank else 1  # nothing says in which order nodes run
        *totals, slopes, value = session.run(asked[::order])[::order]
        assert [t.tolist() for t in totals] == [[i * size, 2.0 * i * size] for i in range(8)]
        assert slopes.tolist() == [float(rank == 0)] * 2
        assert value == session.run(variable) == 1.0
        for kind in (hvd.HorovodInternalError, tf.errors.FailedPreconditionError):
            with pytest.raises(kind, match=r"^allreduce of .*: shapes differ between ranks"):
                session.run(wrong)


CASES = [name for name in dir() if name.startswith("case_")]


@pytest.mark.parametrize("case", CASES)
def test_ops_on_two_ranks(run_case, case):
    run_case(globals()[case], "gloo", 2)


def test_importing_ringlet_does_not_import_tensorflow():
    import subprocess
    import sys

    code = (
        "import sys, ringlet; assert 'tensorflow' not in sys.modules and 'keras' not in sys.modules"
    )
    subprocess.run([sys.executable, "-I", "-c", code], check=True, timeout=60)

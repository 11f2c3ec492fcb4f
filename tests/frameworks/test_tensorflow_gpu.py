"""TensorFlow's eager tensors that go to the engine as arrays on a GPU, which a stand-in plays.

Their memory is that of tensors on the CPU, which TensorFlow exports as it does those of a GPU. That
exporting waits for its stream there, and what TensorFlow's allocator does, is not seen.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import pytest
import tensorflow as tf

sys.path.insert(0, str(Path(__file__).parents[1]))

from standin import DeviceArray, Gpu, engine_on
from standin.streams import Memory

import ringlet.tensorflow as hvd
from ringlet.job import session as runtime
from ringlet.ring.dtypes import storage
from ringlet.ring.transports.local import run_local
from ringlet.tensorflow.ops import placement


@pytest.fixture
def on_both(monkeypatch):
    """Run a function on two ranks with tensors in host memory, then with tensors on a GPU.

    Returns what it returns by rank, of both, and how many arrays went directly.
    """
    mine = threading.local()
    # TensorFlow's dispatcher is to meet types in one thread: see semantics_job.meet_types.
    x = drawn(0, 2, 3)
    tf.reduce_sum(tf.cast(9 * x * x > 0, tf.int64))

    def array(place, tensor, pointer, keeper):
        kind, count = storage(tensor.dtype.name), int(tensor.shape.num_elements())
        raw = np.empty(0, kind)
        if count:
            raw = np.frombuffer(
                (ctypes.c_uint8 * (kind.itemsize * count)).from_address(pointer), kind
            )
        mine.viewed.append(DeviceArray(raw, Memory(mine.gpu), base=keeper))
        return mine.viewed[-1]

    monkeypatch.setattr(placement, "_array", array)
    monkeypatch.setattr(placement, "_gpu_of", lambda place, pointer: mine.number)
    monkeypatch.setattr(placement, "_on_gpu", lambda tensor: mine.direct)
    monkeypatch.setattr(
        runtime, "Engine", lambda comm, control, limits, *_: engine_on(mine.gpu, comm, limits)
    )

    def run(body, number=0):
        def rank_main(direct):
            mine.gpu, mine.viewed, mine.direct, mine.number = Gpu(), [], direct, number
            hvd.init()
            try:
                with mine.gpu.train:
                    result = body()
            finally:
                hvd.shutdown()
            for each in mine.viewed:  # the host has waited for the last write
                stream, time = each.memory.writer or (0, 0)
                assert time <= mine.gpu.finished.get(stream, 0)
            return result, len(mine.viewed)

        return [run_local(lambda comm, d=d: rank_main(d), 2) for d in (False, True)]

    return run


def drawn(seed, *shape):
    return tf.constant(np.random.default_rng(seed).standard_normal(shape), tf.float32)


def same(found):
    for (host, staged), (gpu, _) in zip(*found, strict=True):
        assert staged == 0
        for i, (a, b) in enumerate(zip(host, gpu, strict=True)):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a.numpy(), b.numpy(), str(i))
    return [viewed for _, viewed in found[1]]


def test_reductions_and_broadcasts(on_both):
    def body():
        rank = hvd.rank()
        x = drawn(rank, 40, 50)
        before = x.numpy()
        outs = [
            hvd.allreduce(x, name="a"),
            hvd.allreduce(x, name="b", compression="int8"),
            hvd.allreduce(tf.cast(x, tf.bfloat16), name="c", prescale_factor=0.5, op=hvd.Sum),
            hvd.allreduce(tf.cast(9 * x, tf.int64), name="d", op=hvd.Max),
            *hvd.grouped_allreduce([x, x[:3], x[:0]], name="e", compression="topk | ef"),
            hvd.broadcast(x, 1, name="f"),
            hvd.broadcast(tf.cast(x > 0, tf.int64), 0, name="g"),
        ]
        assert len(outs) == 9
        outs += [  # what is staged
            hvd.allreduce(tf.cast(9 * x, tf.int32), name="h"),
            hvd.allreduce(x, name="i", op=hvd.Max, compression="fp16"),
            hvd.allreduce(x, name="j", op=hvd.Adasum),
            tf.function(lambda y: tf.constant(placement.direct([y], hvd.Sum) is None))(x),
            hvd.allgather(x, name="l"),
        ]
        with tf.GradientTape() as tape:
            tape.watch(x)
            total = tf.reduce_sum(hvd.allreduce(x, name="m") * x)
        outs.append(tape.gradient(total, x))
        np.testing.assert_array_equal(x.numpy(), before)
        return outs

    # Two arrays for each of the first nine, and for the last one forward and back.
    assert same(on_both(body)) == [2 * 9 + 4] * 2


def test_tensors_on_another_gpu_are_staged_with_a_warning(on_both, caplog):
    placement._warn_of.cache_clear()
    assert same(on_both(lambda: [hvd.allreduce(drawn(hvd.rank(), 5), name="a")], number=3)) == [
        0,
        0,
    ]
    assert "tensors on GPU 3 go through host memory, because this rank's is GPU 0" in caplog.text


def test_what_is_exported_is_the_tensors_own_memory():
    for dtype in placement._NEW:
        tensor = tf.zeros([3, 4], dtype)
        result = placement._empty_like(tensor)
        (source, _), (target, keeper) = placement._export(tensor), placement._export(result)
        nbytes = 12 * storage(dtype).itemsize
        ctypes.memset(target, 1, nbytes)
        assert source != target
        assert result.numpy().tobytes() == b"\1" * nbytes
        assert not tensor.numpy().any()
        del result, keeper
    assert placement._export(tf.zeros([0, 4]))[0] == 0

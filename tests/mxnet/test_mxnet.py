"""ringlet.mxnet on real ranks: `make test-mxnet` installs MXNet and runs it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.preloaded("torch")
CHECKS = ("reductions", "movements", "one semantics", "training", "module", "drift", "mistakes")
SIZE = 2


# What docs/mxnet.md has users install, with what that asks for; and a program that finds no more.
NEEDED = ("ringlet", "numpy", "numba", "llvmlite", "mpi4py", "mxnet")
NEEDED += ("requests", "urllib3", "idna", "certifi", "charset_normalizer")
WITHOUT_MORE = f"""
import sys

class Nothing:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top not in (*sys.stdlib_module_names, *{NEEDED}) and not top.startswith("_"):
            raise ModuleNotFoundError(f"no {{name}} here", name=name)

sys.meta_path.insert(0, Nothing())
import ringlet.mxnet as hvd
import mxnet as mx

hvd.init()
for spec in ("none", "fp16", "int8 | ef"):
    total = hvd.allreduce(mx.nd.ones(3) * hvd.rank(), op=hvd.Sum, name=spec, compression=spec)
    assert total.asnumpy().tolist() == [1] * 3
assert "torch" not in sys.modules
hvd.shutdown()
print("done")
"""


class HalfPrecision:
    """A cast that a program has written for Horovod."""

    @staticmethod
    def compress(tensor):
        return tensor.astype("float16"), tensor.dtype

    @staticmethod
    def decompress(tensor, dtype):
        return tensor.astype(dtype)


def main():
    import horovod.mxnet as hvd
    import mxnet as mx
    from mxnet import autograd, gluon

    from ringlet.compressors import parse
    from ringlet.compressors.testing.tools.simulate import simulate

    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    ones = mx.nd.ones

    mine = ones((2, 3)) * (rank + 1)
    for op, value in ((None, 1.5), (hvd.Sum, 3), (hvd.Min, 1), (hvd.Max, 2), (hvd.Product, 2)):
        assert hvd.allreduce(mine, op=op).asnumpy().tolist() == [[value] * 3] * 2
    assert mine.asnumpy().tolist() == [[rank + 1] * 3] * 2
    for dtype in ("float16", "float32", "float64", "uint8", "int8", "int32", "int64"):
        total = hvd.allreduce(ones((300, 70), dtype=dtype), average=False)
        assert (np.dtype(total.dtype).name, set(total.asnumpy().reshape(-1))) == (dtype, {size})
    assert hvd.allreduce_(mine, average=False) is mine
    assert mine.asnumpy().tolist() == [[3] * 3] * 2
    one, two = hvd.grouped_allreduce([ones(3), ones(2) * rank], name="two", op=hvd.Sum)
    assert (one.asnumpy().tolist(), two.asnumpy().tolist()) == ([2] * 3, [1] * 2)
    scaled = hvd.allreduce(ones(2), op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.25)
    assert scaled.asnumpy().tolist() == [1, 1]
    values = mx.nd.array(np.random.default_rng(rank).normal(size=4096))
    mean = hvd.allreduce(values, name="plain").asnumpy()
    for spec, near in (("int8", 0.05), ("fp16", 1e-2), (hvd.Compression.fp16, 1e-2)):
        assert np.allclose(hvd.allreduce(values, compression=spec).asnumpy(), mean, atol=near)
    own = ones(3) * rank  # a cast of Horovod's kind, which is of no spec
    assert hvd.allreduce_(own, op=hvd.Sum, compression=HalfPrecision) is own
    assert own.asnumpy().tolist() == [1] * 3
    assert hvd.reducescatter(ones(2), op=hvd.Sum, compression=HalfPrecision).asnumpy() == [2]
    print("reductions", flush=True)

    gathered = hvd.allgather(ones((rank + 1, 2)) * rank)
    assert gathered.asnumpy().tolist() == [[0, 0], [1, 1], [1, 1]]
    assert hvd.broadcast(ones(3) * rank, 1).asnumpy().tolist() == [1, 1, 1]
    own = ones(3) * rank
    assert hvd.broadcast_(own, 1) is own
    assert own.asnumpy().tolist() == [1, 1, 1]
    moved = hvd.alltoall(mx.nd.arange(2) + 10 * rank)
    assert moved.asnumpy().tolist() == [rank, rank + 10]
    moved, received = hvd.alltoall(ones(3) * rank, mx.nd.array([1, 2]))
    assert (moved.size, received.asnumpy().tolist()) == (2 * (rank + 1), [rank + 1] * 2)
    assert hvd.reducescatter(ones((4, 2)), op=hvd.Sum).asnumpy().tolist() == [[2, 2]] * 2
    assert hvd.grouped_reducescatter([ones(2), ones(4)])[1].shape == (2,)
    grouped = (hvd.grouped_allreduce, hvd.grouped_allreduce_, hvd.grouped_allgather)
    for each in (*grouped, hvd.grouped_reducescatter):
        assert each([]) == []  # as a network without parameters of one's own asks for
        with pytest.raises(TypeError, match="takes a list of tensors, not one of the tensors"):
            each(ones((2, 3)))
    assert [each.shape for each in hvd.grouped_allgather([ones(1), ones((1, 2))])] == [(2,), (2, 2)]
    assert hvd.allgather_object(rank) == [0, 1]
    hvd.barrier()
    print("movements", flush=True)

    for spec in ("int8 | ef", "onebit | ef", "qsgd", "topk(ratio=0.05) | int8 | ef"):
        param = gluon.Parameter("w", shape=(50, 60))
        param.initialize(mx.init.Zero())
        trainer = hvd.DistributedTrainer([param], "sgd", {"learning_rate": 1.0}, compression=spec)
        states = [{} for _ in range(size)]
        for step in range(3):
            draw = [np.random.default_rng([r, step]).normal(size=3000) for r in range(size)]
            given = [each.astype("float32") for each in draw]
            with autograd.record():
                loss = (param.data() * mx.nd.array(given[rank].reshape(50, 60))).sum()
            loss.backward()
            trainer.allreduce_grads()
            expected = simulate(parse(spec), given, states, step, "w", (50, 60))[0]
            assert np.array_equal(param.grad().asnumpy().reshape(-1), expected), (spec, step)
        assert trainer.residual_norm() > 0 or spec == "qsgd"
    print("one semantics", flush=True)

    mx.random.seed(rank)
    net = gluon.nn.Sequential()
    net.add(gluon.nn.Dense(64, activation="relu"), gluon.nn.Dense(1))
    net.initialize()
    params = net.collect_params()
    hvd.broadcast_parameters(params, root_rank=0)  # when their shapes are known
    trainer = hvd.DistributedTrainer(params, "adam", {"learning_rate": 0.01},
                                     compression="topk(ratio=0.1) | ef")  # fmt: skip
    numbers = np.random.default_rng(rank)
    x = mx.nd.array(numbers.normal(size=(256, 32)))
    y = (x[:, 0] * x[:, 1]).reshape((-1, 1))
    losses = []
    for _ in range(60):
        with autograd.record():
            loss = gluon.loss.L2Loss()(net(x), y)
        loss.backward()
        trainer.step(len(x))
        losses.append(float(loss.mean().asscalar()))
    assert losses[-1] < losses[0] / 2
    assert hvd.replicas_equal(params)
    print("training", flush=True)

    inner = mx.optimizer.create("sgd", learning_rate=1.0, rescale_grad=1.0)
    optimizer = hvd.DistributedOptimizer(inner)
    weight = mx.nd.zeros(3)
    for step in range(2):
        optimizer.update(0, weight, ones(3) * (rank + 1), optimizer.create_state(0, weight))
        assert weight.asnumpy().tolist() == [-1.5 * (step + 1)] * 3
    optimizer.set_learning_rate(0.5)
    assert inner.learning_rate == 0.5
    first, weight = hvd.add_process_set([0]), mx.nd.zeros(3)
    optimizer = hvd.DistributedOptimizer(mx.optimizer.SGD(learning_rate=1.0), process_set=first)
    for _ in range(3):  # rank 1 is not part of it, and goes by its own gradients
        optimizer.update(0, weight, ones(3) * (rank + 1), optimizer.create_state(0, weight))
    assert weight.asnumpy().tolist() == [-3.0 * (rank + 1)] * 3
    assert hvd.remove_process_set(first)

    texts = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())
    logging.getLogger("ringlet").addHandler(handler)

    # A Module tells the optimizer that it is given the names of weights.
    layer = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=40, name="layer")
    module = mx.mod.Module(
        mx.sym.LinearRegressionOutput(layer, mx.sym.Variable("y")), label_names=["y"]
    )
    module.bind(data_shapes=[("data", (4, 50))], label_shapes=[("y", (4, 40))])
    module.init_params(mx.init.One())
    inner = mx.optimizer.create("sgd", learning_rate=0.1, rescale_grad=0.25)
    routes = {"*_bias": "none", "*_weight": "topk(ratio=0.01)", "*_wieght": "none"}
    optimizer = hvd.DistributedOptimizer(inner, compression=routes)
    module.init_optimizer(kvstore=None, optimizer=optimizer)
    assert sorted(inner.idx2name.values()) == ["layer_bias", "layer_weight"]
    optimizer.set_lr_mult({"layer_bias": 0.0})
    for _ in range(2):
        batch = mx.io.DataBatch([mx.nd.random.normal(shape=(4, 50))], [mx.nd.zeros((4, 40))])
        module.forward_backward(batch)
        module.update()
        sent = module._exec_group.grad_arrays[0][0].asnumpy()
        assert 0 < np.count_nonzero(sent) <= 20 * size
    found, _ = module.get_params()
    assert not found["layer_bias"].asnumpy().any()  # as it was
    assert len(texts) == (rank == 0), texts
    assert all("'*_wieght' matches none" in text and "layer_weight" in text for text in texts)
    optimizer.rescale_grad = 0.5
    assert inner.rescale_grad == 0.5
    texts.clear()
    print("module", flush=True)

    def stepped(trainer, param, batch_sizes):
        for batch_size in batch_sizes:
            with autograd.record():
                loss = (param.data() * (rank + 1)).sum()
            loss.backward()
            trainer.step(batch_size)
        hvd.barrier()

    for first, rate, words in (
        (0.0, 0.1, None),
        (float(rank), 0.1, "'w' differs between ranks after the first step"),
        (0.0, 0.1 + rank, "the learning rate differs between ranks after the first step"),
    ):
        param = gluon.Parameter("w", shape=(3,))
        param.initialize(mx.init.Constant(first))
        trainer = hvd.DistributedTrainer([param], "sgd", {"learning_rate": rate})
        stepped(trainer, param, [4] * 12)
        assert hvd.replicas_equal({"w": param}) is (words is None)
        assert len(texts) == (words is not None and rank == 0), texts
        assert all(words in text for text in texts), texts
        texts.clear()
        if words is None:
            stepped(trainer, param, [2, 4])
            with pytest.raises(hvd.HorovodInternalError, match="'rescale_grad' differs between"):
                stepped(trainer, param, [4 - rank])
            stepped(trainer, param, [4])
            assert hvd.replicas_equal({"w": param})
    for kind, own in (("sgd", {"wd": 0.1 * rank}), ("adam" if rank else "sgd", {})):
        trainer = hvd.DistributedTrainer([param], kind, own)
        with pytest.raises(hvd.HorovodInternalError, match="pass the same on all ranks"):
            stepped(trainer, param, [4])
    optimizer = hvd.DistributedOptimizer(mx.optimizer.create("sgd", momentum=0.1 * rank))
    weight = mx.nd.zeros(3)
    with pytest.raises(hvd.HorovodInternalError, match="'momentum' differs between ranks"):
        optimizer.update(0, weight, ones(3), optimizer.create_state(0, weight))
    logging.getLogger("ringlet").removeHandler(handler)
    print("drift", flush=True)

    with pytest.raises(hvd.HorovodInternalError, match="shapes differ"):
        hvd.allreduce(ones(3 + rank), name="odd")
    with pytest.raises(hvd.HorovodInternalError, match="'a' differs between ranks"):
        hvd.broadcast_parameters({"a": ones(3 + rank)})
    for given in (np.ones(3), [1.0, 2.0]):
        for spec in (None, "int8", hvd.Compression.fp16):
            with pytest.raises(TypeError, match=r"tensor must be an NDArray, not (ndarray|list)"):
                hvd.allreduce(given, compression=spec)
    for each in (hvd.allgather, hvd.reducescatter):
        with pytest.raises(TypeError, match="must be an NDArray, not list"):
            each([1.0, 2.0])
    sparse = mx.nd.zeros((4, 2), stype="row_sparse")
    with pytest.raises(TypeError, match=r"is sparse \(row_sparse\).*tostype\('default'\)"):
        hvd.allreduce(sparse)
    # Gradients of one device alone would be reduced.
    spread = gluon.Parameter("w", shape=(3,))
    spread.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
    deferred = gluon.Parameter("w", shape=(0,), allow_deferred_init=True)
    deferred.initialize(ctx=[mx.cpu(0), mx.cpu(1)])
    for each in (spread, deferred):
        with pytest.raises(ValueError, match=r"'w' is on 2 devices \(cpu\(0\), cpu\(1\)\)"):
            hvd.broadcast_parameters({"w": each})
    with pytest.raises(ValueError, match="'w' is on 2 devices"):
        hvd.DistributedTrainer([spread], "sgd").step(4)
    with pytest.raises(TypeError, match=r"of dtype bool.*astype\('uint8'\)"):
        hvd.allreduce(mx.nd.array([True, False], dtype="bool"))
    with pytest.raises(TypeError, match=r"takes net\.collect_params.* not a list"):
        hvd.broadcast_parameters([ones(3)])
    with pytest.warns(UserWarning, match="reduces gradients by itself"):
        assert hvd.DistributedTrainer(params, optimizer)._optimizer is optimizer._optimizer
    with pytest.raises(ValueError, match="needs a name"):
        hvd.allreduce(ones(3), compression="int8 | ef")
    last = hvd.join()
    assert 0 <= last < size
    print("mistakes", flush=True)


def two_ranks(program):
    """Run a program of Horovod's on two ranks."""
    run = [sys.executable, "-m", "ringlet", "run", "-np", str(SIZE), sys.executable]
    command = [*run, "-m", "ringlet.as_horovod", str(program)]
    return subprocess.run(
        command, env=os.environ.copy(), capture_output=True, text=True, timeout=200, check=False
    )


@pytest.fixture(scope="module")
def job():
    return two_ranks(__file__)


@pytest.mark.parametrize("check", CHECKS)
def test_two_ranks(job, check):
    assert job.stdout.count(f">: {check}\n") == SIZE, job.stdout + job.stderr


def test_the_packages_that_the_page_names_are_enough():
    # Interpreters with this flag are not forked from one that has imported more.
    program = [sys.executable, "-W", "default", "-c", WITHOUT_MORE]
    run = [sys.executable, "-m", "ringlet", "run", "-np", str(SIZE), *program]
    done = subprocess.run(run, capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout.count(">: done\n") == SIZE, done.stdout + done.stderr


@pytest.mark.parametrize("script", ["gluon_mnist", "module_mnist"])
def test_what_horovods_examples_do(script):
    done = two_ranks(Path(__file__).with_name("horovod_scripts") / f"{script}.py")
    assert done.stdout.count(">: trained\n") == SIZE, done.stdout + done.stderr


def test_programs_of_horovods_may_import_mxnet_first(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("""
import mxnet as mx
import horovod.mxnet as hvd
hvd.init()
print(hvd.allreduce(mx.nd.ones(3), op=hvd.Sum).asnumpy().tolist())
""")
    done = two_ranks(script)
    assert done.stdout.count(">: [2.0, 2.0, 2.0]\n") == SIZE, done.stdout + done.stderr


if __name__ == "__main__":
    main()

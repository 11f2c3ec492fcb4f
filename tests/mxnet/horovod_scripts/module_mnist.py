"""What Horovod's Module example does, on drawn digits: its calls, with its import."""

import horovod.mxnet as hvd
import mxnet as mx
import numpy as np

hvd.init()
rank, num_workers, batch_size = hvd.rank(), hvd.size(), 32
context = mx.cpu(hvd.local_rank())

draw = np.random.default_rng(0)
shapes = draw.normal(size=(10, 144))
labels = draw.integers(0, 10, 1024)
images = (shapes[labels] + draw.normal(size=(1024, 144))).astype("float32")
shard = slice(rank, 896, num_workers)
train_data = mx.io.NDArrayIter(images[shard], labels[shard], batch_size, True)
val_data = mx.io.NDArrayIter(images[896:], labels[896:], batch_size) if rank == 0 else None

hidden = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=32, name="first")
output = mx.sym.FullyConnected(
    mx.sym.Activation(hidden, act_type="relu"), num_hidden=10, name="out"
)
net = mx.sym.SoftmaxOutput(output, name="softmax")

mod = mx.mod.Module(symbol=net, context=[context])
mod.bind(data_shapes=train_data.provide_data, label_shapes=train_data.provide_label)
mod.init_params(mx.initializer.Xavier())
arg_params, aux_params = mod.get_params()
if arg_params:
    hvd.broadcast_parameters(arg_params, root_rank=0)
if aux_params:
    hvd.broadcast_parameters(aux_params, root_rank=0)
mod.set_params(arg_params=arg_params, aux_params=aux_params)

opt = mx.optimizer.create(
    "sgd", sym=net, learning_rate=0.1, momentum=0.9, rescale_grad=1.0 / batch_size
)
opt = hvd.DistributedOptimizer(opt)
mod.fit(
    train_data,
    num_epoch=4,
    kvstore=None,
    batch_end_callback=mx.callback.Speedometer(batch_size, 10) if rank == 0 else None,
    optimizer=opt,
)

found, _ = mod.get_params()
sums = {name: float(value.abs().sum().asscalar()) for name, value in found.items()}
assert len({str(each) for each in hvd.allgather_object(sums)}) == 1
if rank == 0:
    ((_, accuracy),) = mod.score(val_data, mx.metric.Accuracy())
    assert accuracy > 0.9, accuracy
print("trained", flush=True)

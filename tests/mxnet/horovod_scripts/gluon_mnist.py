"""What Horovod's Gluon example does, on drawn digits: its calls, with its import."""

import argparse
import time

import horovod.mxnet as hvd
import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--dtype", default="float32")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--momentum", type=float, default=0.9)
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
args = parser.parse_args()

hvd.init()
context = mx.cpu(hvd.local_rank())
num_workers = hvd.size()

draw = np.random.default_rng(0)
shapes = draw.normal(size=(10, 1, 12, 12))
labels = draw.integers(0, 10, 1024)
images = (shapes[labels] + draw.normal(size=(1024, 1, 12, 12))).astype(args.dtype)
shard = slice(hvd.rank(), 896, num_workers)
train_iter = mx.io.NDArrayIter(images[shard], labels[shard], args.batch_size, shuffle=True)
val_iter = mx.io.NDArrayIter(images[896:], labels[896:], args.batch_size)


def evaluate(model, data_iter):
    data_iter.reset()
    metric = mx.metric.Accuracy()
    for batch in data_iter:
        output = model(batch.data[0].as_in_context(context).astype(args.dtype, copy=False))
        metric.update([batch.label[0].as_in_context(context)], [output])
    return metric.get()


model = gluon.nn.HybridSequential()
model.add(gluon.nn.Conv2D(8, 3, activation="relu"), gluon.nn.MaxPool2D(), gluon.nn.Flatten())
model.add(gluon.nn.Dense(32, activation="relu"), gluon.nn.Dense(10))
model.cast(args.dtype)
model.hybridize()

optimizer_params = {"momentum": args.momentum, "learning_rate": args.lr}
opt = mx.optimizer.create("sgd", **optimizer_params)
model.initialize(mx.init.Xavier(rnd_type="gaussian", magnitude=2), ctx=context)
params = model.collect_params()
if params is not None:
    hvd.broadcast_parameters(params, root_rank=0)
trainer = hvd.DistributedTrainer(
    params, opt, gradient_predivide_factor=args.gradient_predivide_factor
)
loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
metric = mx.metric.Accuracy()

for epoch in range(args.epochs):
    tic = time.time()
    train_iter.reset()
    metric.reset()
    for batch in train_iter:
        data = batch.data[0].as_in_context(context)
        label = batch.label[0].as_in_context(context)
        with autograd.record():
            output = model(data.astype(args.dtype, copy=False))
            loss = loss_fn(output, label)
        loss.backward()
        trainer.step(args.batch_size)
        metric.update([label], [output])
    if hvd.rank() == 0:
        _, train_acc = metric.get()
        _, val_acc = evaluate(model, val_iter)
        print(f"epoch {epoch}: {time.time() - tic:.1f} s, {train_acc:.3f}, {val_acc:.3f}")

sums = sum(float(param.data().abs().sum().asscalar()) for param in params.values())
assert len(set(hvd.allgather_object(sums))) == 1
if hvd.rank() == 0:
    assert val_acc > 0.9, "Achieved accuracy is lower than expected"
print("trained", flush=True)

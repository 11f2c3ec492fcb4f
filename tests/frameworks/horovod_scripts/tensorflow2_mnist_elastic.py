"""In the calls of Horovod's tensorflow2_mnist_elastic.py."""

import horovod.tensorflow as hvd
import tensorflow as tf

hvd.init()
(images, labels), _ = tf.keras.datasets.mnist.load_data(path=f"mnist-{hvd.rank()}.npz")
dataset = tf.data.Dataset.from_tensor_slices(
    (tf.cast(images[..., tf.newaxis] / 255.0, tf.float32), tf.cast(labels, tf.int64))
)
dataset = dataset.repeat().shuffle(1000).batch(32)
model = tf.keras.Sequential([tf.keras.layers.Flatten(), tf.keras.layers.Dense(10, "softmax")])
loss = tf.losses.SparseCategoricalCrossentropy()
lr = 0.001
opt = tf.optimizers.Adam(lr * hvd.size())
losses = []


@tf.function
def training_step(images, labels):
    with tf.GradientTape() as tape:
        probs = model(images, training=True)
        loss_value = loss(labels, probs)
    tape = hvd.DistributedGradientTape(tape)
    grads = tape.gradient(loss_value, model.trainable_variables)
    opt.apply_gradients(zip(grads, model.trainable_variables, strict=True))
    return loss_value


for x, y in dataset.take(1):  # both have variables before the state looks for them
    training_step(x, y)


@hvd.elastic.run
def train(state):
    for state.batch in range(state.batch, 20 // hvd.size()):  # noqa: B020
        x, y = next(iter(dataset))
        losses.append(float(training_step(x, y)))
        if state.batch % 5 == 0 and state.batch > 0:
            state.commit()


def on_state_reset():
    opt.lr.assign(lr * hvd.size())


state = hvd.elastic.TensorFlowKerasState(model, opt, batch=0)
state.register_reset_callbacks([on_state_reset])
train(state)
on_state_reset()
variables = [*model.variables, *opt.variables()]

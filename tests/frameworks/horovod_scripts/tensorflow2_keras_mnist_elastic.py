"""In the calls of Horovod's tensorflow2_keras_mnist_elastic.py."""

import horovod.tensorflow.keras as hvd
import tensorflow as tf

hvd.init()
(images, labels), _ = tf.keras.datasets.mnist.load_data(path=f"mnist-{hvd.rank()}.npz")
dataset = tf.data.Dataset.from_tensor_slices(
    (tf.cast(images[..., tf.newaxis] / 255.0, tf.float32), tf.cast(labels, tf.int64))
)
dataset = dataset.repeat().shuffle(1000).batch(32)
model = tf.keras.Sequential([tf.keras.layers.Flatten(), tf.keras.layers.Dense(10, "softmax")])
scaled_lr = 0.001 * hvd.size()
opt = hvd.DistributedOptimizer(
    tf.optimizers.Adam(scaled_lr), backward_passes_per_step=1, average_aggregated_gradients=True
)
model.compile(
    loss=tf.losses.SparseCategoricalCrossentropy(),
    optimizer=opt,
    metrics=["accuracy"],
    experimental_run_tf_function=False,
)
model.fit(dataset, steps_per_epoch=1, epochs=1, callbacks=None, verbose=0)  # builds both
state = hvd.elastic.KerasState(model, batch=100, epoch=0)
state.register_reset_callbacks(
    [lambda: tf.keras.backend.set_value(state.model.optimizer.lr, 0.001 * hvd.size())]
)
callbacks = [
    hvd.elastic.UpdateEpochStateCallback(state),
    hvd.elastic.UpdateBatchStateCallback(state),
    hvd.elastic.CommitStateCallback(state),
]


@hvd.elastic.run
def train(state):
    return model.fit(
        dataset,
        steps_per_epoch=8 // hvd.size(),
        epochs=2 - state.epoch,
        callbacks=callbacks,
        verbose=0,
    )


losses, variables = train(state).history["loss"], model.weights

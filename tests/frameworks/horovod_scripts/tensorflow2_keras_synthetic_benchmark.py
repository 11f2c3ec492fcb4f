"""In the calls of Horovod's tensorflow2_keras_synthetic_benchmark.py, with a smaller model."""

from timeit import default_timer as timer

import horovod.tensorflow.keras as hvd
import tensorflow as tf

hvd.init()
model = tf.keras.Sequential(
    [tf.keras.Input((8, 8, 3)), tf.keras.layers.Flatten(), tf.keras.layers.Dense(1000)]
)
opt = tf.optimizers.SGD(0.01)
data = tf.random.uniform([32, 8, 8, 3])
target = tf.random.uniform([32, 1], minval=0, maxval=999, dtype=tf.int64)
dataset = tf.data.Dataset.from_tensor_slices((data, target)).cache().repeat().batch(8)
opt = hvd.DistributedOptimizer(opt, compression=hvd.Compression.fp16)
model.compile(
    loss=tf.losses.SparseCategoricalCrossentropy(from_logits=True),
    optimizer=opt,
    experimental_run_tf_function=False,
)


class TimingCallback(tf.keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.img_secs = []

    def on_epoch_begin(self, epoch, logs=None):
        self.starttime = timer()

    def on_epoch_end(self, epoch, logs=None):
        self.img_secs.append(8 * 4 / (timer() - self.starttime))


timing = TimingCallback()
callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), timing]
model.fit(dataset, batch_size=8, steps_per_epoch=4, callbacks=callbacks, epochs=1, verbose=0)
history = model.fit(
    dataset, batch_size=8, steps_per_epoch=4, callbacks=[timing], epochs=2, verbose=0
)
losses, variables = history.history["loss"], model.weights

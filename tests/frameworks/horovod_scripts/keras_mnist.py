"""In the calls of Horovod's keras_mnist.py for TensorFlow 2."""

import math

import horovod.keras as hvd
import keras
import tensorflow as tf
from keras import backend as K  # noqa: N812 - as scripts call it
from keras.layers import Conv2D, Dense, Dropout, Flatten, MaxPooling2D
from keras.models import Sequential

hvd.init()
gpus = tf.config.experimental.list_physical_devices("GPU")
if gpus:
    tf.config.experimental.set_visible_devices(gpus[hvd.local_rank()], "GPU")
epochs = math.ceil(4.0 / hvd.size())
(x_train, y_train), (x_test, y_test) = tf.keras.datasets.mnist.load_data()
if K.image_data_format() == "channels_first":
    raise SystemExit("channels come last here")
x_train = x_train.reshape(x_train.shape[0], 28, 28, 1).astype("float32") / 255
x_test = x_test.reshape(x_test.shape[0], 28, 28, 1).astype("float32") / 255
y_train, y_test = keras.utils.to_categorical(y_train, 10), keras.utils.to_categorical(y_test, 10)
model = Sequential()
model.add(Conv2D(4, kernel_size=(3, 3), activation="relu", input_shape=(28, 28, 1)))
model.add(MaxPooling2D(pool_size=(2, 2)))
model.add(Dropout(0.25))
model.add(Flatten())
model.add(Dense(10, activation="softmax"))
opt = keras.optimizers.Adadelta(1.0 * hvd.size())
opt = hvd.DistributedOptimizer(opt)
model.compile(loss=keras.losses.categorical_crossentropy, optimizer=opt, metrics=["accuracy"])
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=1.0 * hvd.size(), warmup_epochs=2),
    hvd.callbacks.LearningRateScheduleCallback(
        initial_lr=1.0 * hvd.size(), multiplier=0.1, start_epoch=3
    ),
    keras.callbacks.ReduceLROnPlateau(patience=10, verbose=1),
]
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint("./checkpoint-{epoch}.h5"))
history = model.fit(
    x_train,
    y_train,
    batch_size=64,
    callbacks=callbacks,
    epochs=epochs,
    verbose=0,
    validation_data=(x_test, y_test),
)
score = model.evaluate(x_test, y_test, verbose=0)
losses, variables = history.history["loss"], model.weights
if hvd.rank() == 0:
    again = hvd.load_model("./checkpoint-1.h5")
    assert type(again.optimizer) is not keras.optimizers.Adadelta

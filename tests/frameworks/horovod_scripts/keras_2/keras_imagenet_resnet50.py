"""In the calls of Horovod's keras_imagenet_resnet50.py, on ``tf.keras``, with a smaller model."""

import os

import horovod.tensorflow.keras as hvd
import tensorflow as tf
from tensorflow import keras

hvd.init()
checkpoint_format = "./checkpoint-{epoch}.h5"
resume_from_epoch = 0
for try_epoch in range(2, 0, -1):
    if os.path.exists(checkpoint_format.format(epoch=try_epoch)):
        resume_from_epoch = try_epoch
        break
resume_from_epoch = int(hvd.broadcast(resume_from_epoch, 0, name="resume_from_epoch"))
verbose = 1 if hvd.rank() == 0 else 0
(images, labels), (test_images, test_labels) = keras.datasets.mnist.load_data()
train_gen = keras.preprocessing.image.ImageDataGenerator(width_shift_range=0.01, rescale=1 / 255)
train_iter = train_gen.flow(images[..., None], keras.utils.to_categorical(labels), batch_size=32)
test_gen = keras.preprocessing.image.ImageDataGenerator(zoom_range=(0.99, 1.01), rescale=1 / 255)
test_iter = test_gen.flow(
    test_images[..., None], keras.utils.to_categorical(test_labels), batch_size=32
)
model = keras.models.Sequential(
    [
        keras.layers.Conv2D(4, [3, 3], activation="relu", input_shape=(28, 28, 1)),
        keras.layers.BatchNormalization(),
        keras.layers.Flatten(),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
if resume_from_epoch > 0 and hvd.rank() == 0:
    model = hvd.load_model(
        checkpoint_format.format(epoch=resume_from_epoch), compression=hvd.Compression.fp16
    )
else:
    initial_lr = 0.0125 * hvd.size()
    opt = keras.optimizers.SGD(learning_rate=initial_lr, momentum=0.9)
    opt = hvd.DistributedOptimizer(opt, compression=hvd.Compression.fp16)
    model.compile(
        loss=keras.losses.categorical_crossentropy,
        optimizer=opt,
        metrics=["accuracy", "top_k_categorical_accuracy"],
        experimental_run_tf_function=False,
    )
schedule = hvd.callbacks.LearningRateScheduleCallback
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr, warmup_epochs=1, verbose=verbose),
    schedule(initial_lr, multiplier=1.0, start_epoch=1, end_epoch=30),
    schedule(initial_lr, multiplier=1e-1, start_epoch=30, end_epoch=60),
]
if hvd.rank() == 0:
    callbacks.append(keras.callbacks.ModelCheckpoint(checkpoint_format))
history = model.fit_generator(
    train_iter,
    steps_per_epoch=len(train_iter) // hvd.size(),
    callbacks=callbacks,
    epochs=3,
    verbose=verbose,
    workers=2,
    initial_epoch=resume_from_epoch,
    validation_data=test_iter,
    validation_steps=2,
)
score = hvd.allreduce(model.evaluate(test_iter, steps=2, workers=2))
assert len(score) == 3
losses, variables = history.history["loss"], model.trainable_variables
assert tf.keras is keras

"""Keras' fit on several ranks, with compressed gradients; any backend of Keras that is installed.

ringlet run -np 2 python examples/keras_fit.py
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
from sklearn.datasets import load_digits

import ringlet.keras as hvd


def main():
    hvd.init()
    keras.utils.set_random_seed(hvd.rank())
    digits = load_digits()
    images, labels = (digits.data / 16).astype(np.float32), digits.target
    own = slice(hvd.rank(), 1500, hvd.size())  # the same number of images on every rank

    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(256, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.Adam(0.001 * hvd.size()),
        compression={"*bias": "none", "*": "int8 | ef"},
    )
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    model.fit(
        images[own],
        labels[own],
        batch_size=25,
        epochs=4,
        verbose=2 if hvd.rank() == 0 else 0,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),  # replicas start alike
            hvd.callbacks.MetricAverageCallback(),  # and see the same metrics
        ],
    )
    accuracy = model.evaluate(images[1500:], labels[1500:], verbose=0)[1]
    if hvd.rank() == 0:
        print(f"accuracy {100 * accuracy:.1f} %, {hvd.stats().ratio:.1f} times fewer bytes sent")
    hvd.shutdown()


if __name__ == "__main__":
    main()

"""The check behind the first promise: replicas hold the same bits."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from ringlet import plain
from ringlet.process_sets import global_process_set


def variables_equal(variables: Sequence[Any]) -> bool:
    """Whether variables are bit-equal on all ranks, whatever Keras runs on."""
    hashed = hashlib.blake2b(digest_size=16)
    for variable in variables:
        array = np.ascontiguousarray(keras.ops.convert_to_numpy(variable))
        hashed.update(f"{array.dtype}{array.shape}".encode())
        hashed.update(array.reshape(-1).view(np.uint8).data)
    return plain.alike(hashed.digest(), "replicas_equal", global_process_set)

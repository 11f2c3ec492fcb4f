"""What Keras 2 took and Keras 3 does not, for scripts written for Horovod.

``ringlet.as_horovod`` puts this into Keras with ``horovod.keras`` or ``horovod.tensorflow``; else
nothing does. Each is what Keras 3 calls otherwise, or has no use for.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

import keras

from ringlet.keras.optimizer import Distributed


class Variables(list[Any]):
    """A list of variables that can be called, for what it is: ``optimizer.variables()``."""

    def __call__(self) -> Variables:
        """Return the list."""
        return self


@functools.cache
def install() -> None:
    """Let Keras take these: arguments of ``compile``, ``optimizer.variables()``, ``optimizer.lr``.

    And ``backend.get_value`` and ``set_value`` of its variables, such as that rate. Under
    ``compile`` a DistributedOptimizer's model is not compiled by XLA unless that is asked for:
    Keras would, on a GPU, and communication cannot be part of it.
    """
    base: Any = keras.optimizers.Optimizer
    held = next(cls for cls in base.__mro__ if "variables" in vars(cls)).variables
    base.variables = property(lambda self: Variables(held.fget(self)), doc=held.__doc__)
    base.lr = property(_rate, _set_rate, doc="The learning rate.")
    # The class that has it: load_model takes an own compile of a model's class for a custom one.
    trainer: Any = next(cls for cls in keras.Model.__mro__ if "compile" in vars(cls))
    written = trainer.compile

    @functools.wraps(written)
    def compile(self: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("experimental_run_tf_function", None)
        optimizer = args[0] if args else kwargs.get("optimizer")
        if isinstance(optimizer, Distributed):
            kwargs.setdefault("jit_compile", False)
        return written(self, *args, **kwargs)

    trainer.compile = compile
    older: Any = importlib.import_module("keras._tf_keras.keras.backend")  # that of tf.keras
    get_value, set_value = older.get_value, older.set_value
    for backend in (older, keras.backend):
        backend.get_value = functools.partial(_get_value, get_value)
        backend.set_value = functools.partial(_set_value, set_value)


def _rate(optimizer: Any) -> Any:
    return optimizer.learning_rate


def _set_rate(optimizer: Any, rate: Any) -> None:
    optimizer.learning_rate = rate


def _get_value(of_others: Any, variable: Any) -> Any:
    if isinstance(variable, keras.Variable):
        return keras.ops.convert_to_numpy(variable)[()]  # of a single one a number, as in Keras 2
    return of_others(variable)


def _set_value(of_others: Any, variable: Any, value: Any) -> None:
    if isinstance(variable, keras.Variable):
        variable.assign(value)
    else:
        of_others(variable, value)

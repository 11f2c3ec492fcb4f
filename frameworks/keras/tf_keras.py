"""DistributedOptimizer for tf_keras, which is Keras 2: ``tf.keras`` under TF_USE_LEGACY_KERAS=1."""

from __future__ import annotations

import inspect
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from ringlet.job.process_sets import ProcessSet
from ringlet.keras import backends
from ringlet.keras.reducing import Reducing, made_of
from ringlet.ring.callers import outside
from ringlet.shared.gradients.optimizer_options import Options


def is_tf_keras() -> bool:
    """Whether ``tf.keras`` is the package tf_keras in this program."""
    return os.environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true")


def in_use() -> Any:
    """Return the package tf_keras if this program uses it, else None."""
    if is_tf_keras():
        import tf_keras

        return tf_keras
    return sys.modules.get("tf_keras")


def is_optimizer(candidate: Any) -> bool:
    """Whether it is an optimizer of tf_keras, a new one or one of ``optimizers.legacy``."""
    library = in_use()
    if library is None:
        return False
    kinds = library.optimizers.Optimizer, library.optimizers.legacy.Optimizer
    return isinstance(candidate, kinds)


class DistributedOfTfKeras(Reducing):
    """What DistributedOptimizer adds to the class of an optimizer of tf_keras.

    ``minimize``, and so ``fit``, ends in ``apply_gradients`` as well.
    """

    _ringlet_computed = False  # whether it was asked for gradients

    @staticmethod
    def _ringlet_reduce(*given: Any) -> tuple[Any, list[Any]]:
        from ringlet.tensorflow.ops.gradient_node import reduced

        return reduced(*given)

    @staticmethod
    def _ringlet_divide(gradient: Any, by: Any) -> Any:
        from ringlet.tensorflow.ops.tensors import divided

        return divided(gradient, by)

    @staticmethod
    def _ringlet_size(process_set: ProcessSet) -> Any:
        from ringlet.tensorflow.ops.topology_ops import size_of

        return size_of(process_set)

    @staticmethod
    def _ringlet_ones(gradients: Sequence[Any]) -> Any:
        import tensorflow as tf

        dense = [getattr(g, "values", g) for g in gradients if g is not None]
        finite = [tf.reduce_all(tf.math.is_finite(values)) for values in dense]
        return tf.where(tf.reduce_all([True, *finite]), 1.0, float("nan"))

    @staticmethod
    def _ringlet_spoiled(gradient: Any, ones: Any) -> Any:
        return DistributedOfTfKeras._ringlet_divide(gradient, ones / ones)

    def compute_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """Return this rank's own gradients, as the wrapped optimizer does."""
        inner: Any = super()
        self._ringlet_computed = True
        return inner.compute_gradients(*args, **kwargs)

    def _compute_gradients(self, *args: Any, **kwargs: Any) -> Any:
        """Return this rank's own gradients, as the wrapped optimizer of ``legacy`` does."""
        inner: Any = super()
        self._ringlet_computed = True
        return inner._compute_gradients(*args, **kwargs)

    def apply_gradients(self, grads_and_vars: Any, *args: Any, **kwargs: Any) -> Any:
        """Reduce gradients over all ranks, then apply them like the wrapped optimizer.

        Before the last of ``backward_passes_per_step`` calls they are added up, and no more. They
        are taken to be reduced already with ``skip_gradients_aggregation=True``, or in the older
        form ``experimental_aggregate_gradients=False``.
        """
        import tensorflow as tf

        inner: Any = super()
        plainly = tf.autograph.experimental.do_not_convert(self._ringlet_apply)
        return plainly(list(grads_and_vars), inner.apply_gradients, args, kwargs)

    def _ringlet_apply(self, pairs: list[Any], inner: Any, args: Any, kwargs: Any) -> Any:
        given = inspect.signature(inner).bind(pairs, *args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        done = given.get("skip_gradients_aggregation", False)
        if done or not given.get("experimental_aggregate_gradients", True) or not pairs:
            self._ringlet_warn_of_own()
            return inner(pairs, *args, **kwargs)
        gradients, variables = map(list, zip(*pairs, strict=True))
        if self._ringlet_accumulator.passes > 1:  # inside a tf.cond it is too late
            build(self, [v for g, v in pairs if g is not None])
        ends, reduced = self._ringlet_reduced(gradients, variables)
        again = list(zip(reduced, variables, strict=True))
        return backends.when(ends, lambda: inner(again, *args, **kwargs), reduced)

    def _ringlet_warn_of_own(self) -> None:
        """Warn, once, where gradients that count as reduced are likely this rank's own."""
        if self._ringlet_computed and self._ringlet.settings.process_set.size() > 1:
            self._ringlet_computed = False
            warnings.warn(
                "gradients are applied as they are, but compute_gradients() has returned this "
                "rank's own, where Horovod's optimizer returned reduced ones: leave out "
                "experimental_aggregate_gradients=False (skip_gradients_aggregation=True), and "
                "apply_gradients reduces them",
                stacklevel=outside(),
            )

    def __setattr__(self, name: str, value: Any) -> None:
        # tf_keras' LossScaleOptimizer sets this on the optimizer that it is put around.
        if name == "_is_wrapped_by_loss_scale_optimizer" and value:
            raise ValueError(backends.LOSS_SCALE_OUTSIDE)
        super().__setattr__(name, value)


def distributed(optimizer: Any, name: str | None, options: Options) -> Any:
    """Return an optimizer of tf_keras as one that reduces gradients.

    Raises ValueError for a policy with a loss scale, unless the optimizer has one.
    """
    library = in_use()
    scaled = library.mixed_precision.LossScaleOptimizer
    if isinstance(getattr(optimizer, "inner_optimizer", None), DistributedOfTfKeras):
        raise ValueError(backends.LOSS_SCALE_OUTSIDE)
    if options.policy.scale.watches and not isinstance(optimizer, scaled):
        raise ValueError(
            f"policy {options.policy.name!r} has a loss scale: put the optimizer of tf_keras into "
            "a tf_keras.mixed_precision.LossScaleOptimizer first, or take 'bf16'"
        )
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    title = getattr(inner, "name", None) or inner._name
    return made_of(optimizer, DistributedOfTfKeras, _saved_as, scaled, title, name, options)


def build(optimizer: Any, variables: Sequence[Any]) -> None:
    """Make what ``optimizer``, one of tf_keras, keeps for ``variables``, unless it is there."""
    import tensorflow as tf

    inner = getattr(optimizer, "inner_optimizer", optimizer)
    with tf.init_scope(), tf.name_scope(inner._name if _older(inner) else inner.name):
        (inner._create_all_weights if _older(inner) else inner.build)(list(variables))


def is_built(optimizer: Any) -> bool:
    """Whether ``optimizer``, one of tf_keras, has made what it keeps."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return bool(inner._hypers_created if _older(inner) else getattr(inner, "_built", False))


def variables_of(optimizer: Any) -> list[Any]:
    """Return what ``optimizer``, one of tf_keras, keeps: its learning rate and loss scale, too."""
    import tensorflow as tf

    inner = getattr(optimizer, "inner_optimizer", optimizer)
    kept = list(inner.variables())
    others = list(inner._hyper.values()) if _older(inner) else [inner._learning_rate]
    if optimizer is not inner and optimizer.dynamic:
        state = optimizer._loss_scale
        others += [state.current_loss_scale, state.counter]
    seen = {id(variable) for variable in kept}
    return kept + [v for v in others if isinstance(v, tf.Variable) and id(v) not in seen]


def velocities_of(optimizer: Any) -> list[Any]:
    """Return the velocities that momentum has made in an SGD of tf_keras."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if _older(inner):
        slots = inner._slots.values() if "momentum" in inner.get_slot_names() else ()
        return [slot["momentum"] for slot in slots]
    return list(getattr(inner, "momentums", ()))


def _saved_as(kind: type) -> str:
    """Return the name under which ``load_model`` looks for an optimizer's class."""
    if kind.__module__.partition(".")[0] == "tf_keras":  # registered as "Custom>SGD", and known
        return kind.__name__
    name: str = in_use().saving.get_registered_name(kind)
    return name


def _older(optimizer: Any) -> bool:
    library = in_use()
    return isinstance(optimizer, library.optimizers.legacy.Optimizer)

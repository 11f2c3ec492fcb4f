"""DistributedOptimizer for Keras: reduces gradients over all ranks before they are applied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras

from ringlet.compressors.specs.routes import Routes, Spec
from ringlet.job.process_sets import ProcessSet, global_process_set
from ringlet.job.session import current
from ringlet.keras import backends, tf_keras
from ringlet.keras.reducing import Reducing, made_of
from ringlet.keras.scaling import variables_given, with_loss_scale
from ringlet.precision import Policy
from ringlet.ring.callers import public
from ringlet.ring.communicator import ReduceOp
from ringlet.shared.gradients.optimizer_options import Options
from ringlet.shared.variable_names import local_variables
from ringlet.shared.wrapping import refuse_wrapped


class Distributed(Reducing):
    """What DistributedOptimizer adds to the class of an optimizer of Keras 3."""

    built: bool
    _ringlet_reduce = staticmethod(backends.reduce_gradients)
    _ringlet_divide = staticmethod(keras.ops.divide)
    _ringlet_size = staticmethod(backends.size_of)
    _ringlet_ones = staticmethod(backends.one_if_finite)
    _ringlet_spoiled = staticmethod(backends.spoiled)

    @backends.as_written
    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        """Reduce ``grads`` over all ranks, then apply them like the wrapped optimizer.

        Before the last of ``backward_passes_per_step`` calls they are added up, and no more. Raises
        ValueError for another number of variables than gradients, or none before it is built.
        """
        inner: Any = super()
        own: Any = self
        gradients = list(grads)
        if not gradients:
            return
        given = variables_given(trainable_variables, self.built)
        variables = list(own._trainable_variables) if given is None else given
        if len(gradients) != len(variables):
            raise ValueError(f"{len(gradients)} gradients for {len(variables)} variables")
        if not self.built:
            with keras.name_scope(own.name):
                own.build(variables)
            own.built = True
        ends, reduced = self._ringlet_reduced(gradients, variables)
        backends.when(ends, lambda: inner.apply(reduced, given), reduced)

    def stateless_apply(self, *args: Any, **kwargs: Any) -> Any:
        """Reduce and apply on Keras's backend jax, whose programs call this; elsewhere refuse.

        What compressors remember stays beside the program, in the order in which it runs.
        """
        if backends.backend() != "jax":
            raise RuntimeError("a DistributedOptimizer has no stateless_apply; use apply")
        inner: Any = super()
        return inner.stateless_apply(*args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        # Keras's LossScaleOptimizer sets this on the optimizer that it is put around.
        inside = name == "loss_scale_factor" and value is None
        if inside and not isinstance(self, keras.optimizers.LossScaleOptimizer):
            raise ValueError(backends.LOSS_SCALE_OUTSIDE)
        super().__setattr__(name, value)

    def _ringlet_scale(self) -> Any:
        guarded = self._ringlet.settings.guard
        return self.dynamic_scale if guarded else None  # type: ignore[attr-defined]


@public
def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Spec | Routes | Any = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp = ReduceOp.AVERAGE,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    precision: str | Policy | None = None,
) -> Any:
    """Return an optimizer that reduces gradients over all ranks before it applies them.

    ``optimizer`` is one of Keras 3, or of tf_keras (its ``optimizers.legacy`` too).
    The result is an instance of a subclass of the optimizer's class that shares its variables and
    is saved as the original; use it instead, in ``model.compile`` or by ``apply``. Its
    ``from_config`` makes one that is distributed in the same way. Wrapped again, such as with
    another ``compression``, the original goes on with momenta, with what was held back, with
    variables that are local, and with passes since the last step if their number stays. A
    LossScaleOptimizer is wrapped from outside: when one rank's gradients overflow, all ranks skip
    the step, and residuals stay as they are.

    - ``compression``: a spec such as ``"topk(ratio=0.01) | ef"``, a Compressor, or a mapping from
      patterns of variables' paths to specs: ``{"*/bias": "none", "*": "int8 | ef"}``.
    - ``sparse_as_dense``: reduce gradients of embeddings as dense ones even where they are large.
    - ``gradient_predivide_factor``: divide by this before the sum and by size / this after it.
    - ``op``: Average or Sum.
    - ``backward_passes_per_step``: calls whose gradients are summed before they are reduced; with
      ``average_aggregated_gradients`` they are averaged.
    - ``groups``: variables that travel together, as lists of them, or how many groups to make.
    - ``process_set``: the ranks that take part; on others gradients stay as they are.
    - ``scale_local_gradients``: divide gradients of local variables by the number of ranks.
    - ``precision``: a policy such as ``"fp16"`` that ``apply_precision`` or ``set_precision`` gave
      the layers: a LossScaleOptimizer with its loss scale, if it has one and ``optimizer`` is none,
      in what sums accumulate, and its wire if ``compression`` is None.

    Devices are accepted for Horovod's sake. Raises ValueError for an optimizer that is wrapped
    already; SpecError for a bad ``compression``; when gradients of different variables meet, or
    ranks have other settings or another class of optimizer, Mismatch (in a tf.function where that
    is called), the same on every rank. One rank logs a warning where weights or learning rates
    differ after the first step, or after 16, 32, ... steps.
    """
    return distributed(optimizer, name, Options.among(locals()))


def distributed(optimizer: Any, name: str | None, options: Options) -> Any:
    """Return ``optimizer`` as one that reduces gradients: see ``DistributedOptimizer``."""
    refuse_wrapped(optimizer, Reducing)
    of_tf_keras = tf_keras.is_optimizer(optimizer)
    if not of_tf_keras and not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(f"optimizer is a keras.optimizers.Optimizer, not {optimizer!r}")
    options.check_sums()
    if of_tf_keras:
        current()
        return tf_keras.distributed(optimizer, name, options)
    if isinstance(getattr(optimizer, "inner_optimizer", None), Distributed):
        raise ValueError(
            "the optimizer inside this LossScaleOptimizer is a DistributedOptimizer already; wrap "
            "the LossScaleOptimizer alone"
        )
    backends.backend()
    current()
    optimizer = with_loss_scale(optimizer, options.policy)
    backends.check_jax(optimizer, options.backward_passes_per_step)
    kind, scaled = keras.saving.get_registered_name, keras.optimizers.LossScaleOptimizer
    return made_of(optimizer, Distributed, kind, scaled, optimizer.name, name, options)


@public
def PartialDistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Spec | Routes | Any = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp = ReduceOp.AVERAGE,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
    precision: str | Policy | None = None,
) -> Any:
    """Return a DistributedOptimizer that leaves the variables of ``local_layers`` alone.

    ``local_layers`` is a Keras layer or several, built already (ValueError), such as embeddings
    that are divided over the ranks.
    """
    options, own = Options.among(locals()), local_variables(local_layers)
    made = distributed(optimizer, name, options)
    for variable in own:
        made.register_local_var(variable)
    return made

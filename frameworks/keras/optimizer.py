"""DistributedOptimizer for Keras 3: reduces gradients over all ranks before they are applied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import keras

from ringlet.compressors.specs.routes import Routes, Spec
from ringlet.job.process_sets import ProcessSet, global_process_set
from ringlet.job.session import current
from ringlet.keras import backends
from ringlet.keras.scaling import with_loss_scale
from ringlet.precision import Policy
from ringlet.precision.guards import unscaled_first
from ringlet.ring.communicator import ReduceOp
from ringlet.shared.accumulation import Accumulator
from ringlet.shared.gradients import Reducer, Staying
from ringlet.shared.model_agreement import unique
from ringlet.shared.optimizer_options import Options
from ringlet.shared.variable_names import cohorts, identity, local_variables, name_of
from ringlet.shared.wrapping import refuse_wrapped, wrapped


class Distributed:
    """What DistributedOptimizer adds to the class of the optimizer that it wraps."""

    built: bool
    _ringlet: Reducer
    _ringlet_accumulator: Accumulator
    _ringlet_staying: tuple[Staying, Accumulator]
    _ringlet_groups: Any
    _ringlet_local: set[int]
    _ringlet_scale_local: bool
    _ringlet_compresses: bool

    @backends.as_written
    def apply(self, grads: Sequence[Any], trainable_variables: Any = None) -> None:
        """Reduce ``grads`` over all ranks, then apply them like the wrapped optimizer.

        Before the last of ``backward_passes_per_step`` calls they are added up, and no more.
        """
        inner: Any = super()
        own: Any = self
        gradients = list(grads)
        if not gradients:
            return
        variables = list(trainable_variables or own._trainable_variables)
        if not self.built:
            with keras.name_scope(own.name):
                own.build(variables)
            own.built = True
        if len(gradients) != len(variables):
            raise ValueError(f"{len(gradients)} gradients for {len(variables)} variables")
        ends, reduced = self._ringlet_reduced(gradients, variables)
        _when(ends, lambda: inner.apply(reduced, trainable_variables))

    def register_local_var(self, variable: Any) -> None:
        """Leave the gradient of ``variable`` as it is on this rank."""
        self._ringlet_local.add(identity(variable))

    def residual_norm(self) -> float:
        """Return the Euclidean norm of what compression holds back on this rank."""
        return self._ringlet.norm()

    def __setattr__(self, name: str, value: Any) -> None:
        # Keras's LossScaleOptimizer sets this on the optimizer that it is put around.
        inside = name == "loss_scale_factor" and value is None
        if inside and not isinstance(self, keras.optimizers.LossScaleOptimizer):
            raise ValueError(
                "a LossScaleOptimizer around a DistributedOptimizer would skip steps on one rank "
                "and not on others. Wrap it the other way round: DistributedOptimizer("
                "keras.optimizers.LossScaleOptimizer(optimizer)). Under the policy mixed_float16, "
                "model.compile puts one around every optimizer that is none"
            )
        super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a DistributedOptimizer cannot be copied or pickled: it is tied to its peers. Save the "
            "model, or optimizer.get_config()"
        )

    def stateless_apply(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: communication is not a pure function."""
        raise RuntimeError("a DistributedOptimizer has no stateless_apply; use apply")

    # -- inside ---------------------------------------------------------------------------------

    def _ringlet_reduced(self, gradients: list[Any], variables: list[Any]) -> tuple[Any, list[Any]]:
        shared = [i for i, v in enumerate(variables) if identity(v) not in self._ringlet_local]
        results = list(gradients)
        self._ringlet_kept(results, variables, [i for i in range(len(results)) if i not in shared])
        chosen = [variables[i] for i in shared]
        names = unique([name_of(v, i) for i, v in enumerate(chosen)])
        given = [gradients[i] for i in shared]
        # Neither residuals nor signs must depend on a loss scale.
        scale = self.dynamic_scale if self._ringlet.settings.guard else None  # type: ignore[attr-defined]
        if scale is not None:
            given = [g if g is None else keras.ops.divide(g, scale) for g in given]
        ends, done = backends.reduce_gradients(
            self._ringlet,
            self._ringlet_accumulator,
            chosen,
            names,
            given,
            cohorts(chosen, self._ringlet_groups),
        )
        if scale is not None:
            back = keras.ops.divide(1.0, scale)
            done = [g if g is None else keras.ops.divide(g, back) for g in done]
        for i, gradient in zip(shared, done, strict=True):
            results[i] = gradient
        return ends, results

    def _ringlet_kept(self, results: list[Any], variables: list[Any], local: list[int]) -> None:
        """Scale the gradients of local variables, and add up those of several passes."""
        process_set = self._ringlet.settings.process_set
        size = process_set.size() if process_set.included() else 1
        if self._ringlet_scale_local and size > 1:
            for i in local:
                if results[i] is not None:
                    results[i] = keras.ops.divide(results[i], size)
        if local and self._ringlet_accumulator.passes > 1:
            chosen = [variables[i] for i in local]
            names = unique([name_of(v, i) for i, v in enumerate(chosen)])
            given = [results[i] for i in local]
            stay, sums = self._ringlet_staying
            _, added = backends.reduce_gradients(
                stay, sums, chosen, names, given, [""] * len(local)
            )
            for i, gradient in zip(local, added, strict=True):
                results[i] = gradient


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
    """Return a Keras 3 optimizer that reduces gradients over all ranks before it applies them.

    The result is an instance of a subclass of the optimizer's class that shares its variables and
    is saved as the original; use it instead, in ``model.compile`` or by ``apply``. Its
    ``from_config`` makes one that is distributed in the same way. A
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
    already; SpecError for a bad ``compression``; when gradients of different variables meet,
    Mismatch (in a tf.function where that is called), the same on every rank.
    """
    return distributed(optimizer, name, Options.among(locals()))


def distributed(optimizer: Any, name: str | None, options: Options) -> Any:
    """Return ``optimizer`` as one that reduces gradients: see ``DistributedOptimizer``."""
    refuse_wrapped(optimizer, Distributed)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        refuse_keras_2(optimizer)
        raise TypeError(f"optimizer is a keras.optimizers.Optimizer, not {optimizer!r}")
    if isinstance(getattr(optimizer, "inner_optimizer", None), Distributed):
        raise ValueError(
            "the optimizer inside this LossScaleOptimizer is a DistributedOptimizer already; wrap "
            "the LossScaleOptimizer alone"
        )
    options.check_sums()
    backends.backend()
    current()
    optimizer = with_loss_scale(optimizer, options.policy)
    scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    settings = options.settings(guard=scales and unscaled_first(options.router))
    base = type(optimizer)

    def from_config(_: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        return distributed(base.from_config(config, *args, **kwargs), None, replace(options))

    # What is saved names the original class, as it is registered.
    registered = keras.saving.get_registered_name(base)
    content = {"from_config": classmethod(from_config), "__module__": base.__module__}
    made = wrapped(optimizer, Distributed, registered, content)
    made.__dict__.update(
        _ringlet=Reducer("DistributedOptimizer", settings, name or optimizer.name),
        _ringlet_accumulator=options.accumulator(),
        _ringlet_staying=(Staying("local variables", settings), options.accumulator()),
        _ringlet_groups=options.grouping,
        _ringlet_local=set(),
        _ringlet_scale_local=options.scale_local_gradients,
    )
    if name is not None:
        made.__dict__["name"] = name
    return made


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

    ``local_layers`` is a Keras layer or several, built already, such as embeddings that are divided
    over the ranks.
    """
    made = distributed(optimizer, name, Options.among(locals()))
    for variable in local_variables(local_layers):
        made.register_local_var(variable)
    return made


def refuse_keras_2(optimizer: Any) -> None:
    """Raise TypeError for an optimizer of the package tf_keras, and say what to do."""
    if type(optimizer).__module__.partition(".")[0] == "tf_keras":
        raise TypeError(
            f"{type(optimizer).__name__} is an optimizer of tf_keras, which is Keras 2; take one "
            "of Keras 3: unset TF_USE_LEGACY_KERAS, or use keras.optimizers"
        )


def _when(ends: Any, apply: Callable[[], Any]) -> None:
    """Call ``apply`` where a step ends, which in a graph is known when it runs."""
    if backends.backend() == "torch":
        if ends:
            apply()
        return
    import tensorflow as tf

    known = bool(ends) if tf.executing_eagerly() else tf.get_static_value(ends)
    if known is None:
        tf.cond(ends, lambda: _then_nothing(apply), tf.no_op)
    elif known:
        apply()


def _then_nothing(apply: Callable[[], Any]) -> Any:
    import tensorflow as tf

    apply()
    return tf.no_op()

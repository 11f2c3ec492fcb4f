"""DistributedGradientTape: gradients that are reduced over all ranks before they are returned."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from ringlet.compressors.specs.routes import Routes, Spec
from ringlet.job.process_sets import ProcessSet, global_process_set
from ringlet.job.session import current
from ringlet.precision import Policy
from ringlet.precision.guards import guards
from ringlet.ring.communicator import ReduceOp
from ringlet.shared.gradients.gradient_reducer import GradientReducer
from ringlet.shared.gradients.gradient_settings import Settings
from ringlet.shared.gradients.loop_reducers import loop_reducers
from ringlet.shared.gradients.optimizer_options import Options
from ringlet.shared.model_agreement import unique
from ringlet.shared.variable_names import (
    identity,
    local_variables,
    name_of,
    refuse_overwritten,
)
from ringlet.shared.wrapping import wrapped
from ringlet.tensorflow.ops.bridge import as_written, in_plain_graph
from ringlet.tensorflow.ops.gradient_node import (
    BROADCAST_VARIABLES,
    mark_reduced,
    reduced_differentiably,
)
from ringlet.tensorflow.ops.tensors import divided
from ringlet.tensorflow.ops.topology_ops import size_of
from ringlet.tensorflow.tape_turns import KIND, TITLE, TapeReducer


class _Distributed:
    """What DistributedGradientTape adds to the class of the tape that it wraps."""

    _ringlet_settings: Settings
    _ringlet_groups: Any
    _ringlet_local: set[int]
    _ringlet_scale_local: bool

    @as_written
    def gradient(
        self,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
        use_generic_names: bool = False,
    ) -> Any:
        """Return the gradients of ``target`` like ``tf.GradientTape``, reduced over all ranks.

        With ``use_generic_names``, ranks tell variables by their places in ``sources``, and not by
        their names.
        """
        inner: Any = super()
        gradients = inner.gradient(target, sources, output_gradients, unconnected_gradients)
        return self._ringlet_reduced(gradients, sources, use_generic_names)

    def get_local_and_global_gradients(
        self, target: Any, sources: Any, *args: Any, **kwargs: Any
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Return pairs of variable and gradient: those of local sources, and those reduced."""
        gradients = tf.nest.flatten(
            self.gradient(target, sources, *args, **kwargs), expand_composites=False
        )
        local: list[tuple[Any, Any]] = []
        shared: list[tuple[Any, Any]] = []
        for source, gradient in zip(tf.nest.flatten(sources), gradients, strict=True):
            kind = local if identity(source) in self._ringlet_local else shared
            kind.append((source, gradient))
        return local, shared

    def register_local_source(self, source: Any) -> None:
        """Leave the gradient of ``source``, a variable, as it is on this rank."""
        self._ringlet_local.add(identity(source))

    def _ringlet_reduced(self, gradients: Any, sources: Any, by_place: bool = False) -> Any:
        flat_sources = tf.nest.flatten(sources)
        flat_gradients = tf.nest.flatten(gradients, expand_composites=False)
        shared = [i for i, s in enumerate(flat_sources) if identity(s) not in self._ringlet_local]
        results = list(flat_gradients)
        process_set = self._ringlet_settings.process_set
        if self._ringlet_scale_local and len(shared) < len(results):
            size = size_of(process_set)
            for i, gradient in enumerate(results):
                if gradient is not None and i not in shared:
                    results[i] = divided(gradient, size)
        variables = [flat_sources[i] for i in shared]
        refuse_overwritten(variables, "DistributedGradientTape")
        names = [f"grad_{i}" for i in range(len(variables))]
        if not by_place:
            names = unique([name_of(v, i) for i, v in enumerate(variables)])
        reducer = _reducer(self._ringlet_settings, variables, names)
        chosen = reducer.cohorts(variables, self._ringlet_groups)
        given = [flat_gradients[i] for i in shared]
        done = reduced_differentiably(reducer, variables, names, given, chosen)
        mark_reduced(done, process_set)
        for i, gradient in zip(shared, done, strict=True):
            results[i] = gradient
        return tf.nest.pack_sequence_as(sources, results)


@as_written
def DistributedGradientTape(  # noqa: N802 - Horovod's name
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Spec | Routes | Any = None,
    sparse_as_dense: bool = False,
    op: ReduceOp = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
    precision: str | Policy | None = None,
) -> Any:
    """Return ``gradtape`` with gradients reduced over all ranks, all of them in one graph node.

    A new tape in every step is as good as one: what compressors remember belongs to the variables.
    Gradients of ``tf.gather`` (IndexedSlices) are fused with the others, and become dense, where
    the variable has less than 65536 elements; larger ones travel, and are returned, as rows with
    duplicates added up.

    - ``compression``: a spec such as ``"topk(ratio=0.01) | ef"``, a Compressor, or a mapping from
      patterns of variable names to specs: ``{"*bias": "none", "*": "int8 | ef"}``.
    - ``sparse_as_dense``: reduce all IndexedSlices as dense tensors.
    - ``op``: Average, Sum or Adasum.
    - ``gradient_predivide_factor``: divide by this before the sum and by size / this after it.
    - ``groups``: variables that travel together, as lists of them, or how many groups to make.
    - ``scale_local_gradients``: divide gradients of local sources by the number of ranks.
    - ``precision``: a policy such as ``"bf16"`` that ``apply_precision`` gave the layers: in what
      sums accumulate, and its wire if ``compression`` is None. A loss scale is the caller's to
      apply, for example a LossScaleOptimizer's: a gradient that overflows on one rank does so on
      all of them. Residuals stay as they are then, and need a scale that stays too (ValueError).

    Devices are accepted for Horovod's sake. Raises Mismatch (in a tf.function where that is
    called), the same on every rank, when ranks have gradients of different variables, or another
    ``precision`` or ``sparse_as_dense``; SpecError for
    a bad ``compression``; ValueError for a tape that is distributed already; RuntimeError under
    ``jit_compile=True``.
    """
    return _distributed(gradtape, Options.among(locals()))


def _distributed(gradtape: Any, options: Options) -> Any:
    if isinstance(gradtape, _Distributed):
        raise ValueError("this tape is a DistributedGradientTape already; wrap a tf.GradientTape")
    if not isinstance(gradtape, tf.GradientTape):
        raise TypeError(f"gradtape is a tf.GradientTape, not {type(gradtape).__name__}")
    current()
    tape = wrapped(gradtape, _Distributed)
    tape._ringlet_settings = options.settings(guards(options.policy, options.router))
    tape._ringlet_groups = options.grouping
    tape._ringlet_local, tape._ringlet_scale_local = set(), options.scale_local_gradients
    return tape


@as_written
def PartialDistributedGradientTape(  # noqa: N802 - Horovod's name
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Spec | Routes | Any = None,
    sparse_as_dense: bool = False,
    op: ReduceOp = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[Any]] | None = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
    precision: str | Policy | None = None,
) -> Any:
    """Return a DistributedGradientTape that leaves the variables of ``local_layers`` alone.

    ``local_layers`` is a Keras layer or several, built already (ValueError), such as embeddings
    divided over the ranks.
    """
    options, own = Options.among(locals()), local_variables(local_layers)
    tape = _distributed(gradtape, options)
    for variable in own:
        tape.register_local_source(variable)
    return tape


def _reducer(settings: Settings, variables: Sequence[Any], names: Sequence[str]) -> GradientReducer:
    """Return the reducer of these settings and variables: the same for every tape of a loop."""
    loops = loop_reducers()
    held = [getattr(variable, "_value", variable) for variable in variables]
    lasting = [hasattr(variable, "assign") for variable in held]  # others are new in every step
    places = zip(held, names, lasting, strict=True)
    kind = (
        in_plain_graph(),
        settings.key(),
        tuple(id(v) if lasts else name for v, name, lasts in places),
    )
    reducer = loops.find(kind, settings.process_set)
    if reducer is None:  # an id says nothing once its variable is gone
        reducer = loops.inherit(kind, settings) or _made(settings)
        if isinstance(reducer, TapeReducer):
            reducer.others = [
                weakref.ref(other)
                for other in loops.where(partial(_of_another_spec, kind), settings.process_set)
            ]
        lasts = [v for v, lasts in zip(held, lasting, strict=True) if lasts]
        loops.add(kind, reducer, lasts)
    return reducer


def _of_another_spec(own: Any, kind: Any) -> bool:
    (_, settings, variables), (_, other_settings, other_variables) = own, kind
    return bool(settings[1:] == other_settings[1:] and variables == other_variables)


def _made(settings: Settings) -> GradientReducer:
    if in_plain_graph():  # where tapes have no order
        return GradientReducer(KIND, settings, TITLE, cure=BROADCAST_VARIABLES)
    return TapeReducer(settings)


def reducer_of_tape(tape: Any, sources: Any) -> GradientReducer:
    """Return what reduces the gradients of ``sources`` for tapes like this one."""
    if not isinstance(tape, _Distributed):
        raise TypeError("this tape is no DistributedGradientTape")
    flat = [s for s in tf.nest.flatten(sources) if identity(s) not in tape._ringlet_local]
    names = unique([name_of(v, i) for i, v in enumerate(flat)])
    return _reducer(tape._ringlet_settings, flat, names)

"""What a DistributedOptimizer is, whichever Keras its optimizer is of: Keras 3 or tf_keras."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

from ringlet.job.process_sets import ProcessSet
from ringlet.precision.guards import unscaled_first
from ringlet.shared.gradients.accumulation import Accumulator
from ringlet.shared.gradients.gradient_reducer import GradientReducer, LocalReducer
from ringlet.shared.gradients.optimizer_options import Options
from ringlet.shared.model_agreement import of_config, unique
from ringlet.shared.variable_names import identity, name_of, refuse_overwritten
from ringlet.shared.wrapping import Original, last_made, note_made, wrapped

_BROADCAST = (
    "put callbacks.BroadcastGlobalVariablesCallback(0) among the callbacks of fit, or call "
    "hvd.broadcast_variables on all ranks before training"
)
_LOCAL = "local gradients are finite"  # what stands for them among what ranks reduce


class Reducing:
    """What is added to the class of any optimizer; a subclass puts it where gradients come in.

    A subclass says how gradients are reduced, and divided, in its framework.
    """

    _ringlet: GradientReducer
    _ringlet_original: Original
    _ringlet_accumulator: Accumulator
    _ringlet_local_reducer: tuple[LocalReducer, Accumulator]
    _ringlet_groups: Any
    _ringlet_local: set[int]
    _ringlet_scale_local: bool
    _ringlet_reduce: Callable[..., tuple[Any, list[Any]]]
    _ringlet_divide: Callable[[Any, Any], Any]
    _ringlet_size: Callable[[ProcessSet], Any]  # the number of ranks, also in what is traced
    _ringlet_skips: bool  # whether it skips a step for gradients that are not finite
    _ringlet_ones: Callable[[Sequence[Any]], Any]  # 1, or NaN where one of them is not finite
    _ringlet_spoiled: Callable[[Any, Any], Any]  # a gradient, or NaN where its second one is NaN

    def register_local_var(self, variable: Any) -> None:
        """Leave the gradient of ``variable`` as it is on this rank."""
        self._ringlet_local.add(identity(variable))

    def residual_norm(self) -> float:
        """Return the Euclidean norm of what compression holds back on this rank."""
        return self._ringlet.memory.norm()

    def forget_passes(self) -> None:
        """Forget what ``backward_passes_per_step`` has added up since the last step."""
        self._ringlet_accumulator.reset()
        self._ringlet_local_reducer[1].reset()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a DistributedOptimizer cannot be copied or pickled: it is tied to its peers. Save the "
            "model, or optimizer.get_config()"
        )

    # -- inside ---------------------------------------------------------------------------------

    def _ringlet_scale(self) -> Any:
        """Return what gradients are multiples of, if that must not be seen by compressors."""
        return None

    def _ringlet_reduced(self, gradients: list[Any], variables: list[Any]) -> tuple[Any, list[Any]]:
        shared = [i for i, v in enumerate(variables) if identity(v) not in self._ringlet_local]
        results = list(gradients)
        local = [i for i in range(len(results)) if i not in shared]
        if local:
            self._ringlet_refuse_common_norm()
        chosen = [variables[i] for i in shared]
        added = self._ringlet_accumulator.passes > 1
        refuse_overwritten(variables if added else chosen, "DistributedOptimizer")
        names = unique([name_of(v, i) for i, v in enumerate(chosen)])
        given = [gradients[i] for i in shared]
        # Neither residuals nor signs must depend on a loss scale.
        scale = self._ringlet_scale()
        if scale is not None:
            given = self._ringlet_quotients(given, scale)
        groups = self._ringlet.cohorts(chosen, self._ringlet_groups)
        watched = bool(local) and self._ringlet_skips
        if watched:  # the ranks have to skip a step together for what one of them alone has, too
            ones = self._ringlet_ones([gradients[i] for i in local])
            chosen, names = [*chosen, ones], [*names, _LOCAL]
            given, groups = [*given, ones], [*groups, ""]
        ends, done = self._ringlet_reduce(
            self._ringlet, chosen, names, given, groups, self._ringlet_accumulator
        )
        self._ringlet_kept(results, variables, local)  # behind: one rank alone may raise here
        if watched:
            *done, ones = done
            for i in local:
                if results[i] is not None:
                    results[i] = self._ringlet_spoiled(results[i], ones)
        if scale is not None:
            done = self._ringlet_quotients(done, 1.0 / scale)
        for i, gradient in zip(shared, done, strict=True):
            results[i] = gradient
        return ends, results

    def _ringlet_kept(self, results: list[Any], variables: list[Any], local: list[int]) -> None:
        """Scale the gradients of local variables, and add up those of several passes."""
        process_set = self._ringlet.settings.process_set
        given = [results[i] for i in local]
        if local and self._ringlet_scale_local:
            given = self._ringlet_quotients(given, self._ringlet_size(process_set))
        if local and self._ringlet_accumulator.passes > 1:
            chosen = [variables[i] for i in local]
            names = unique([name_of(v, i) for i, v in enumerate(chosen)])
            reducer, sums = self._ringlet_local_reducer
            _, given = self._ringlet_reduce(reducer, chosen, names, given, [""] * len(local), sums)
        for i, gradient in zip(local, given, strict=True):
            results[i] = gradient

    def _ringlet_refuse_common_norm(self) -> None:
        own: Any = getattr(self, "inner_optimizer", self)
        if getattr(own, "global_clipnorm", None):
            raise ValueError(
                "global_clipnorm takes the norm of all gradients, and those of local layers are "
                "other ones on each rank, so that shared weights would drift apart: use clipnorm"
            )

    def _ringlet_quotients(self, gradients: list[Any], by: Any) -> list[Any]:
        return [None if g is None else self._ringlet_divide(g, by) for g in gradients]


def made_of(
    optimizer: Any,
    mixin: type[Reducing],
    kind: Callable[[type], str],
    scales: type | tuple[type, ...],
    title: str,
    name: str | None,
    options: Options,
) -> Any:
    """Return a distributed optimizer that shares the variables of ``optimizer``.

    It is saved as the class that ``kind`` names, which is the original one. Optimizers of the
    classes ``scales`` have a loss scale.
    """
    settings = options.settings(
        guard=isinstance(optimizer, scales) and unscaled_first(options.router)
    )
    base: Any = type(optimizer)
    told = {"the class of the optimizer": base.__name__, **of_config(optimizer)}

    def from_config(_: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        again = base.from_config(config, *args, **kwargs)
        return made_of(again, mixin, kind, scales, title, None, replace(options))

    content = {"from_config": classmethod(from_config), "__module__": base.__module__}
    if (before := last_made(optimizer)) is not None:
        before._ringlet_original.take_back(before)
    made = wrapped(optimizer, mixin, kind(base), content)
    told |= options.passes
    reducer = GradientReducer(
        "DistributedOptimizer", settings, name or title, told=told, cure=_BROADCAST
    )
    added, local = reducer.accumulators = options.accumulator(), options.accumulator()
    if before is not None:
        reducer.inherit(before._ringlet)
    made.__dict__.update(
        _ringlet=reducer,
        _ringlet_original=Original(optimizer),
        _ringlet_accumulator=added,
        _ringlet_local_reducer=(LocalReducer("local variables", settings), local),
        _ringlet_groups=options.grouping,
        _ringlet_local=set() if before is None else set(before._ringlet_local),
        _ringlet_skips=isinstance(optimizer, scales),
        _ringlet_scale_local=options.scale_local_gradients,
    )
    if name is not None:
        made.__dict__["name"] = name
    # To ask the older ones of tf_keras makes the rate's variable, ahead of the others.
    if "learning_rate" in getattr(made, "_hyper", ["learning_rate"]):
        made._ringlet.rate = partial(_rate, weakref.ref(made))
    note_made(optimizer, made)
    return made


def _rate(reference: weakref.ref[Any]) -> Any:
    """Return the learning rate of an optimizer, as its library has it."""
    optimizer: Any = reference()
    rate = optimizer.learning_rate
    return rate(optimizer.iterations) if callable(rate) else rate

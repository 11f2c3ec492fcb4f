"""``reduce_gradients``: what makes any optax optimizer a distributed one."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ringlet.compressors import Compressor
from ringlet.compressors.base.nesting import overrides
from ringlet.compressors.states import prescale
from ringlet.jax.carried_states import to_carry_over
from ringlet.jax.held_state import Held, flattened, merge_layouts, nested, store
from ringlet.jax.ops.operands import dtype_of
from ringlet.jax.ops.ordered_calls import Output, call
from ringlet.jax.ops.watched_arrays import FLAG, compare_where, raise_flag
from ringlet.jax.reduction_state import (
    DIVIDED,
    ReduceGradientsState,
    is_state,
    made_by_path,
    warn_of_owner,
)
from ringlet.jax.tree_paths import paths_and_leaves
from ringlet.job.json_exchange import gather
from ringlet.job.process_sets import ProcessSet, global_process_set
from ringlet.job.session import Runtime, current, is_initialized
from ringlet.precision import Policy
from ringlet.precision.reduction import carrier
from ringlet.ring.callers import no_process_set, public
from ringlet.ring.communicator import ReduceOp
from ringlet.ring.dtypes import Array
from ringlet.ring.errors import Mismatch
from ringlet.shared.arrays import numpy_dtype
from ringlet.shared.gradients.gradient_reducer import GradientReducer
from ringlet.shared.gradients.gradient_settings import Settings, Slot
from ringlet.shared.gradients.optimizer_options import Options
from ringlet.shared.list_changes import ListTurns
from ringlet.shared.model_agreement import agree
from ringlet.shared.residual_store import put

log = logging.getLogger("ringlet")

Layouts = dict[str, dict[str, tuple[str, tuple[int, ...]]]]  # dtype and shape, by path and key

_KIND = "reduce_gradients"
_LATEST = 24  # schedules are tried at the steps 0, 1, 2, 4, ..., 2 ** _LATEST
_BROADCAST = "call params = hvd.broadcast_pytree(params) on all ranks before training"
_ALIKE = (
    "give every rank the same gradients and the same compression; make the state by init on every "
    "rank, or restore the state of the same step on every rank; where one rank keeps an earlier "
    "state, such as after a loss that is not finite, let all ranks do so"
)


@public
def reduce_gradients(
    compression: Any = None,
    op: ReduceOp = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    precision: str | Policy | None = None,
    reduction: str | None = None,
) -> optax.GradientTransformation:
    """Return a transformation that replaces gradients by their average over all ranks, or sum.

    ``optax.chain(reduce_gradients("topk(ratio=0.01) | ef"), optax.adam(1e-3))`` is a distributed
    Adam. ``update`` works inside ``jax.jit`` and outside, in one exchange for all gradients; all
    ranks call it with gradients of the same paths, shapes and dtypes (Mismatch, the same on every
    rank). None has no gradient.

    - ``compression``: a spec, or a mapping of patterns of paths such as "dense/kernel" to specs.
    - ``op``: Average, Sum or Adasum; ``gradient_predivide_factor`` as in Horovod.
    - ``reduction``: in what sums accumulate: "float32", or "wire" for the gradients' own dtype if
      that is how the transport adds. None leaves it to ``precision``, a policy's name, and without
      one to the transport.

    On ranks outside of ``process_set`` gradients stay as they are.

    ``init`` is collective where a compressor remembers something, because it finds out what: it
    reduces zeros, at step 0 and at other steps of schedules. Raises SpecError (a ValueError), and
    ValueError for a compressor whose state changes its shape.
    """
    if not isinstance(process_set, ProcessSet):
        raise TypeError(no_process_set(process_set))
    if reduction not in (None, "float32", "wire"):
        raise ValueError(f"reduction is 'float32', 'wire' or None, not {reduction!r}")
    options = Options(
        compression=compression,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        process_set=process_set,
        precision=precision,
    )
    if options.policy.scale.watches:
        raise ValueError(
            f"policy {options.policy.name!r} has a loss scale, which JAX's optimizers keep "
            "themselves: take 'bf16' or 'amp_bf16', or scale and unscale around reduce_gradients"
        )
    plain = options.settings()
    chosen = plain.reduction if reduction is None else reduction
    made = _Reductions(replace(plain, reduction=chosen))
    return optax.GradientTransformation(made.init, made.update)


class _Lent(NamedTuple):
    """What compressors remember, in memory of XLA's, for the time of one call.

    ``places`` has arrays by path and key; ``present`` says which of them somebody has made, as in
    ``ReduceGradientsState``, and ``now_present`` is to say so afterwards. They are of ``among``
    ranks.
    """

    places: dict[str, dict[str, Array]]
    present: Array
    now_present: Array
    among: int


class _Reductions:
    """The reducers of one transformation: one for each list of gradients."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._lock = settings, threading.Lock()
        self._numbering, self._label = threading.Lock(), ""
        self._numbered_in: object = None
        self._numbers: dict[tuple[Slot, ...], Iterator[str]] = {}
        self._runtime: object = None
        self._reducers: dict[tuple[Slot, ...], GradientReducer] = {}
        self.changes: ListTurns | None = None  # the calls of ``update``, by what is reduced
        self._layouts: dict[tuple[Slot, ...], Layouts] = {}
        self._following: int | None = None  # the step that comes next

    @public
    def init(self, params: Any) -> ReduceGradientsState:
        """Return the state for gradients like ``params``, which may be shapes and dtypes."""
        slots = _slots(params)
        layouts = self._layout(slots)
        held = {
            path: {key: np.zeros(shape, numpy_dtype(dtype)) for key, (dtype, shape) in each.items()}
            for path, each in layouts.items()
        }
        step, carried, filled, whose = 0, to_carry_over(), set[tuple[str, str]](), None
        if carried is not None:
            step, filled, whose = carried.over_to(held, slots, self._settings)
        keys = [(path, key) for path in sorted(held) for key in sorted(held[path])]
        there = [self._mark(each[0]) if each in filled else 0 for each in keys]
        present = there or [0]  # orbax saves no empty arrays
        arrays = jax.tree.map(jnp.array, held)
        owner = jnp.array(self._own(whose or [0, 1]), jnp.int32)
        return ReduceGradientsState(jnp.int32(step), jnp.array(present, jnp.uint8), arrays, owner)

    @public
    def update(
        self, updates: Any, state: ReduceGradientsState, params: Any = None
    ) -> tuple[Any, ReduceGradientsState]:
        """Return the reduced gradients, and what compressors remember now.

        ``params``, if given, are compared with other ranks' after the first step, and now and then.
        """
        if not is_state(state):
            raise TypeError(
                "the state of reduce_gradients comes from its init(params), not "
                f"{type(state).__name__}: state = transformation.init(params)"
            )
        slots, (leaves, tree) = _slots(updates), jax.tree_util.tree_flatten(updates)
        if is_initialized() and self._settings.process_set.included():
            self._labels(slots)  # while programs are traced, which is in one order on all ranks
        leaves = [leaf if hasattr(leaf, "shape") else jnp.asarray(leaf) for leaf in leaves]
        keys = [(path, key) for path in sorted(state.held) for key in sorted(state.held[path])]
        remembered = [state.held[path][key] for path, key in keys]
        missing = sorted(set(state.held) - {slot.name for slot in slots})
        if missing:
            raise ValueError(
                f"the state is of other gradients: it remembers {missing[0]!r}, and these are "
                f"{', '.join(repr(slot.name) for slot in slots[:3])}. Where a transformation has "
                "parameters of its own, reduce inside it: "
                "optax.lookahead(optax.chain(reduce_gradients(...), optimizer), ...)"
            )
        outputs: list[Output] = [(slot.dtype, slot.shape) for slot in slots]
        outputs += [("uint8", tuple(state.present.shape)), ("int32", (2,))]
        outputs += [(array.dtype.name, tuple(array.shape)) for array in remembered]
        outputs += [FLAG, ("int32", ())]
        first = len(slots)

        def exchange(arrays: Sequence[Array], results: Sequence[Array]) -> None:
            step, present = int(arrays[first]), arrays[first + 1]
            owner, *kept, flag, following = results[first + 1 :]
            flag[...] = 0
            given = arrays[first + 2].tolist()
            owner[...] = self._own(given)
            if present.any() and owner.tolist() != given:
                warn_of_owner(given, owner.tolist())
            for source, target in zip(arrays[first + 3 :], kept, strict=True):
                if source.ctypes.data != target.ctypes.data:
                    target[...] = source
            places: dict[str, dict[str, Array]] = {}
            for (path, key), target in zip(keys, kept, strict=True):
                places.setdefault(path, {})[key] = target
            lent = _Lent(places, present, results[first], max(given[1], 1))
            following[...] = self._run(slots, arrays[:first], results[:first], step, lent, flag)

        aliases = tuple((first + 3 + i, first + 2 + i) for i in range(len(keys)))
        given = [*leaves, state.step, state.present, state.owner, *remembered]
        *results, due, following = call(exchange, given, outputs, aliases)
        compare_where(due, lambda: self._reducers[slots].drift, _numbers(params))
        held: Held = {path: {} for path in state.held}
        for (path, key), array in zip(keys, results[first + 2 :], strict=True):
            held[path][key] = array
        step = following.astype(jnp.result_type(state.step))
        after = ReduceGradientsState(step, results[first], held, results[first + 1])
        return jax.tree_util.tree_unflatten(tree, results[:first]), after

    # -- inside ---------------------------------------------------------------------------------

    def _own(self, other: list[int]) -> list[int]:
        """Return this rank and their number; ``other`` where it is none of them."""
        ranks = self._settings.process_set
        return [ranks.rank(), ranks.size()] if ranks.included() else other

    def _divides(self, path: str) -> bool:
        """Whether a gradient is divided by the number of ranks before it is compressed."""
        averages = self._settings.averages
        return averages and self._settings.router(path).traits().predivide

    def _mark(self, path: str) -> int:
        """Return what ``present`` says of what is there of a gradient's compressor."""
        return DIVIDED if self._divides(path) else 1

    def _bind(self) -> None:
        """Forget what was among the ranks of another runtime: newcomers know nothing of it."""
        if self._runtime is not current():
            self._runtime, self._reducers, self._layouts = current(), {}, {}
            self.changes = self._following = None

    def _labels(self, slots: tuple[Slot, ...]) -> Iterator[str]:
        """Return names for what ranks agree on about ``slots``, the same on all of them.

        By the order in which they are asked for first, whether by ``init`` or by ``update``.
        """
        with self._numbering:
            runtime = current()
            if self._numbered_in is not runtime:
                self._numbered_in, self._numbers = runtime, {}
                self._label = runtime.unnamed(_KIND, self._settings.process_set.number())
            if slots not in self._numbers:
                label = f"{self._label}.{len(self._numbers)}"
                self._numbers[slots] = map(f"{label}.{{}}".format, count())
            return self._numbers[slots]

    def agree(self, slots: Sequence[Slot], called: str, step: int) -> int:
        """Return the step. Raise Mismatch, the same on every rank, unless all do the same now.

        One whose compressors remember nothing begins with ``update``, and others with ``init``.
        Later on some rank has told the others that its gradients, or its step, are not those that
        come next. Ranks that joined early have counted fewer steps: all go on from the last one.
        """
        label, changes = next(self._labels(tuple(slots))), self.changes
        ranks = self._settings.process_set
        joined = bool(current().joins)
        if changes is not None and changes.changed:
            label = f"{self._label}.new{changes.call}"
            joined = changes.first_after_join
        chosen = self._settings.router
        items = [(slot.name, f"{slot.describe()}, {chosen(slot.name)}") for slot in slots]
        items.append(("the call", called))
        if not joined:
            items.append(("the step", str(step)))
        try:
            agree(_KIND, label, items, ranks, _ALIKE)
        except Mismatch:  # on all ranks, which have asked for names of different lists
            with self._numbering:
                self._label, self._numbers = f"{self._label}.again", {}
            for reducer in self._reducers.values():
                reducer.pass_over()
            raise
        if not joined or called == "init":
            return step
        expected = "the number of a step"
        told = gather(step, f"{label}.step", ranks, expected, lambda n: isinstance(n, int))
        return int(max(told))

    def _run(
        self,
        slots: tuple[Slot, ...],
        arrays: Sequence[Array],
        outputs: Sequence[Array],
        step: int,
        lent: _Lent,
        flag: Array,
    ) -> int:
        """Reduce ``arrays`` into ``outputs``; return the number of the next step.

        ``flag`` is raised where parameters are to be compared.
        """
        if not self._settings.process_set.included():
            for array, out in zip(arrays, outputs, strict=True):
                out[...] = array
            lent.now_present[...] = lent.present
            return step + 1
        self._labels(slots)  # those of the present ranks
        with self._lock:
            self._bind()
            if self.changes is None:
                number = self._settings.process_set.number()
                self.changes = ListTurns(current(), self._label, number)
            # What is drawn in common goes by the step: a rank at another one would part.
            key = slots, 0 if self._following is None else step - self._following
            self.changes.begin(key)
            done, reducer = None, self._reducers.get(slots)
            try:
                if reducer is None:
                    step = self.agree(slots, "update", step)
                    made = _OfOneList(self, self._settings, not self._reducers)
                    reducer = self._reducers[slots] = made
                    self._warn_of_forgotten(made_by_path(lent.places, lent.present))
                self._recall(reducer, slots, step, lent)
                reducer.go_to(step)
                reducer.reduce(slots, arrays, (), outputs, lambda: raise_flag(flag))
                self._hold(reducer, lent)
                self._following, done = max(reducer.step, step + 1), key
                return self._following
            finally:
                self.changes.end(done)
                if reducer is not None:  # its states lie in memory that is XLA's again
                    for state in reducer.memory.states.values():
                        put(state, {})

    def _recall(
        self, reducer: GradientReducer, slots: Sequence[Slot], step: int, lent: _Lent
    ) -> None:
        """Let compressors go on, at ``step``, from what is ``lent``."""
        chosen, states = self._settings.router, reducer.memory.states
        divided = made_by_path(lent.places, lent.present == DIVIDED)
        for path, known in made_by_path(lent.places, lent.present).items():
            if _forgets(chosen(path)):  # or a later spec would add what is long out of date
                continue
            state = states.setdefault(path, {})
            put(state, nested(known))
            before = lent.among if divided[path] else 1  # of another spec, or among other ranks
            after = self._settings.process_set.size() if self._divides(path) else 1
            if before != after:
                prescale(state, chosen(path), before / after)
        for slot in slots:  # which compressors that remember nothing else count, too
            states.setdefault(slot.name, {})["step"] = step

    def _hold(self, reducer: GradientReducer, lent: _Lent) -> None:
        """Put what compressors remember now where it is ``lent``."""
        first = 0
        for path in sorted(reducer.memory.states):  # as ``places`` are
            arrays = lent.places.get(path, {})
            flags = lent.now_present[first : first + len(arrays)]
            store(reducer.memory.states[path], arrays, flags, f"the compressor of {path!r}")
            flags *= self._mark(path)
            first += len(arrays)
        lent.now_present[first:] = 0

    def _warn_of_forgotten(self, known: Mapping[str, Mapping[str, Any]]) -> None:
        """Tell the first rank what another spec has left of gradients that now leave nothing."""
        chosen = self._settings.router
        lost = [
            (path, sorted(arrays), chosen(path))
            for path, arrays in known.items()
            if arrays and _forgets(chosen(path))
        ]
        if lost and self._settings.process_set.rank() == 0:
            path, keys, compressor = lost[0]
            log.warning(
                "the state of reduce_gradients holds %s of %r, of which %r makes nothing%s: what "
                "was held back of these gradients is lost, and the next state is without it. A "
                "spec with '| ef' would go on with it",
                keys, path, str(compressor),
                f"; and so on of {len(lost) - 1} more" if len(lost) > 1 else "",
            )  # fmt: skip

    def _layout(self, slots: tuple[Slot, ...]) -> Layouts:
        """Return what compressors remember of these gradients. Collective, if they do."""
        settings = self._settings
        if not settings.process_set.included() or settings.process_set.size() == 1:
            return {}
        with self._lock:
            self._bind()
            layouts = self._layouts
        found = layouts.get(slots)
        if found is None:  # without the lock: programs that run meanwhile take it
            found = layouts[slots] = self._tried(slots)
        return found

    def _tried(self, slots: tuple[Slot, ...]) -> Layouts:
        settings = self._settings
        asked = {slot: settings.router(slot.name) for slot in slots}
        steps = [0, *(2**i for i in range(_LATEST + 1))]
        schedules: dict[tuple[str, ...], int] = {}
        for step in steps if any(overrides(c, "at") for c in asked.values()) else steps[:1]:
            now = tuple(str(compressor.at(step)) for compressor in asked.values())
            schedules.setdefault(now, step)
        remembering = []
        for slot, compressor in asked.items():
            used, _ = carrier(compressor, slot.dtype, prod(slot.shape), settings.reduction)
            if any(used.at(step).traits().stateful for step in schedules.values()):
                remembering.append(slot)
        if not remembering:
            return {}
        self.agree(slots, "init", 0)
        reducer = GradientReducer(f"{_KIND}.init", settings, warns=False)
        seen: dict[str, list[dict[str, Array]]] = {}
        for step in schedules.values():
            reducer.restart(step)
            reducer.reduce(remembering, list(map(_some_values, remembering)))
            for path, state in reducer.memory.states.items():
                seen.setdefault(path, []).append(flattened(state))
                put(state, {})
        reducer.restart(0)
        try:
            layouts = {path: merge_layouts(states) for path, states in sorted(seen.items())}
        except ValueError as error:
            raise ValueError(f"compression={settings.router}: {error}") from error
        return {path: layout for path, layout in layouts.items() if layout}


class _OfOneList(GradientReducer):
    """The reducer of one list of gradients, among those that a transformation has."""

    _counts = False

    def __init__(self, owner: _Reductions, settings: Settings, first: bool) -> None:
        super().__init__(_KIND, settings, warns=first, cure=_BROADCAST)
        self._owner = owner

    def _bind(self, runtime: Runtime) -> None:
        super()._bind(runtime)
        assert self._owner.changes is not None
        self._changes = self._owner.changes

    def _compared(self, slots: Sequence[Slot], unused: Sequence[str]) -> list[str]:
        if self._changes.changed:
            step = self._owner.agree(slots, "update", self.step)
            if step != self.step:
                self.go_to(step)
                for slot in slots:
                    self.memory.states[slot.name]["step"] = step
        return super()._compared(slots, unused)


def _forgets(compressor: Compressor) -> bool:
    """Whether a compressor remembers nothing, whatever another one has left."""
    return not compressor.traits().stateful and not overrides(compressor, "at")


def _some_values(slot: Slot) -> Array:
    """Return values to try compressors with: of zeros some remember nothing."""
    values = np.cos(np.arange(prod(slot.shape), dtype=np.float32)).reshape(slot.shape)
    return values.astype(numpy_dtype(slot.dtype))


def _slots(tree: Any) -> tuple[Slot, ...]:
    paths, leaves = paths_and_leaves(tree)
    slots = []
    for path, leaf in zip(paths, map(_as_jax_takes_it, leaves), strict=True):
        slots.append(Slot(path, dtype_of(leaf, f"the gradient of {path!r}"), tuple(leaf.shape)))
    return tuple(slots)


def _numbers(params: Any) -> dict[str, Any]:
    """Return the arrays of numbers in ``params``, by path."""
    paths, leaves = paths_and_leaves(params)
    return {
        path: leaf
        for path, leaf in zip(paths, leaves, strict=True)
        if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.number)
    }


def _as_jax_takes_it(leaf: Any) -> Any:
    """Return something of the shape and dtype that JAX gives a number, or an array of NumPy's."""
    if isinstance(leaf, np.ndarray | np.generic | int | float | complex):
        array = np.asarray(leaf)
        if array.dtype != jax.dtypes.float0:
            return jax.ShapeDtypeStruct(array.shape, jax.dtypes.canonicalize_dtype(array.dtype))
    return leaf

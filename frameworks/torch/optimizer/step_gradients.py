"""The gradients of one step that a reducer has handed to the engine, and where results go."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from ringlet.ring.communicator import ReduceOp
from ringlet.ring.dtypes import Array
from ringlet.torch.ops.reductions import allreduce
from ringlet.torch.optimizer.backward_passes import BackwardPasses
from ringlet.torch.optimizer.declared_gradients import DeclaredGradients
from ringlet.torch.parameters.frozen import is_still
from ringlet.torch.tensors.placement import HOST, flat_at, packed, place_of
from ringlet.torch.tensors.shared_storage import are_shared, is_expanded, overlaps
from ringlet.torch.tensors.views import as_flat, shares_memory


class _Copy(NamedTuple):
    """A ``copy`` that is reduced instead of the gradient of ``p``.

    ``shared`` if others use the gradient's memory; ``delivered`` if the result goes elsewhere.
    """

    p: torch.nn.Parameter
    grad: torch.Tensor
    copy: torch.Tensor
    shared: bool
    delivered: bool


class StepGradients:
    """The gradients that ``backward`` has noted, as arrays of what is ``declared``, and results.

    What is reduced of 16-bit parameters in host memory can be delivered elsewhere. All others are
    reduced in place, but for those whose memory others use too.
    """

    def __init__(self, declared: DeclaredGradients, backward: BackwardPasses) -> None:
        self.finite = True  # whether all that is ``unscaled`` is
        self.rows: dict[str, int] = {}  # sparse dimensions, of gradients that some rank had sparse
        self.cure = ""  # what to do instead of changing a gradient before it is reduced
        self._results: Mapping[str, torch.Tensor] = {}  # where to deliver
        self._declared, self._backward = declared, backward
        self._last: frozenset[str] = frozenset()  # what the last step reduced
        self._taken: set[str] = set()
        self._sparse: dict[str, int] = {}  # sparse dimensions of gradients that had some
        self._after: list[Callable[[], object]] = []  # what puts results where they belong
        self._copies: list[_Copy] = []  # what is reduced instead of gradients
        self._still: dict[str, tuple[torch.nn.Parameter, torch.Tensor | None]] = {}  # and gradients

    # -- what masters ask for ---------------------------------------------------------------------

    def deliver(self, results: Mapping[str, torch.Tensor], cure: str) -> None:
        """Let results go to ``results`` (float32, of the parameters' shapes), by name.

        Those of gradients that are elsewhere than in host memory, or travel as rows, stay there.
        ``cure`` says what to do instead of changing a gradient before it is reduced.
        """
        self._results, self.cure = results, cure

    def delivered(self, name: str) -> torch.Tensor | None:
        """Return the last step's result, sparse where the gradient was; None if it is in there."""
        dense = self._result(name) if name in self._last else None
        dims = self._sparse.get(name)
        return dense if dense is None or dims is None else dense.to_sparse(dims)

    def unscaled(self, name: str) -> bool:
        """Whether the last result is divided by the loss scale, and was looked at, already."""
        fused = name in self._last and self._declared.places.get(name) == HOST
        return fused and self._declared.unscaling is not None

    # -- a step -----------------------------------------------------------------------------------

    def begin_epoch(self) -> None:
        """Know nothing of what ranks before have reduced: one rank alone hands in nothing."""
        self.finite, self.rows, self._sparse, self._last = True, {}, {}, frozenset()

    def take(
        self, names: Sequence[str], arriving: str | None = None
    ) -> list[tuple[str, Array, Array | None]]:
        """Return, of each name, flat arrays of the gradient and for its result.

        The gradient is the one that was noted, else that of the parameter, or zeros. Without the
        second array the result goes to the first. ``arriving`` is the name whose hook is running.
        Raises TypeError or RuntimeError for a gradient that is not what was declared.
        """
        found: list[tuple[str, Array, Array | None]] = []
        parameters, places = self._declared.parameters, self._declared.places
        results, noted = self._results, self._backward.noted
        grads = [
            noted[name][0] if name in noted else self._unnoted(name, parameters[name])
            for name in names
        ]
        shared = are_shared(grads, names.index(arriving) if arriving in names else None)
        # A model may have hundreds: what is usual is done here, without calls.
        for name, grad, others in zip(names, grads, shared, strict=True):
            p, view = parameters[name], None
            if grad.dtype is p.dtype and places[name] == HOST and not others:
                view = as_flat(grad)
            if view is None:
                view = self._view(name, p, grad, others)
            elif self._sparse:
                self._sparse.pop(name, None)
            result = results.get(name) if results and places[name] == HOST else None
            found.append((name, view, None if result is None else flat_at(result, HOST)))
        self._taken.update(names)
        return found

    def _unnoted(self, name: str, p: torch.nn.Parameter) -> torch.Tensor:
        """Return the gradient of ``p``, from now on noted; zeros if it has none."""
        if is_still(p):  # momenta, weight decay and what was held back must not move it
            self._still[name] = p, p.grad
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        self._backward.note(name, p.grad)
        return p.grad

    def is_news(self, names: Sequence[str]) -> bool:
        """Whether this rank has taken a sparse gradient of ``names`` that is not in ``rows``."""
        sparse = self._sparse
        return bool(sparse) and any(name in sparse and name not in self.rows for name in names)

    def share_rows(self, label: str) -> None:
        """Learn which gradients any rank had sparse in this step, or before it. Collective."""
        parameters, process_set = self._declared.parameters, self._declared.process_set
        own = self.rows | self._sparse
        marks = torch.tensor([1 + own.get(name, -1) for name in parameters])
        marks = allreduce(marks, name=label, op=ReduceOp.MAX, process_set=process_set)
        found = zip(parameters, marks.tolist(), strict=True)
        self.rows = {name: int(mark) - 1 for name, mark in found if mark}
        self._make_sparse()

    def _make_sparse(self) -> None:
        """Make the last results sparse where some rank had a sparse gradient, and this one none.

        Optimizers round sparse ones in another way, and SparseAdam takes no others.
        """
        for name, dims in self.rows.items():
            p = self._declared.parameters[name]
            if name not in self._last or not p.requires_grad:
                continue
            self._sparse[name] = dims
            if p.grad is not None and not p.grad.is_sparse:
                p.grad = p.grad.to_sparse(dims)

    def put(self, finite: bool) -> None:
        """Put results where gradients were; ``finite`` is what was seen where they lost a scale."""
        self.finite, self._last = finite, frozenset(self._taken)
        with torch.no_grad():
            for put in self._after:
                put()
            self._put_copies()
            for name, (p, before) in self._still.items():
                p.grad = before
                if before is not None and not before.is_sparse:  # a sparse one was not written to
                    before.zero_()
                if before is not None and (result := self._result(name)) is not None:
                    result.zero_()
        self._make_sparse()

    def clear(self) -> None:
        """Begin a new step."""
        self._after, self._copies, self._still = [], [], {}
        self._taken = set()

    def _result(self, name: str) -> torch.Tensor | None:
        """Return where the result of a gradient is delivered to, if that is elsewhere."""
        return self._results.get(name) if self._declared.places.get(name) == HOST else None

    def _put_copies(self) -> None:
        """Put results where gradients were, or apart from there, where elements were in one memory.

        Those of two gradients, or of one that is expanded.
        """
        apart = overlaps([each.grad for each in self._copies if each.shared])
        for p, grad, copy, shared, delivered in self._copies:
            if (shared and apart.pop(0)) or (not delivered and is_expanded(grad)):
                p.grad = torch.empty_like(grad).copy_(copy)
            elif not delivered:
                grad.copy_(copy)

    def _view(self, name: str, p: torch.nn.Parameter, grad: torch.Tensor, shared: bool) -> Array:
        if grad.dtype is not p.dtype:
            raise TypeError(f"the gradient of {name!r} is {grad.dtype}, the parameter {p.dtype}")
        place, delivered = self._declared.places[name], self._result(name) is not None
        if place != HOST and place_of(grad, self._declared.op) != place:
            raise RuntimeError(
                f"the gradient of {name!r} is on {grad.device}, where it was not when the "
                "optimizer was made; wrap the original optimizer again"
            )
        if grad.is_sparse:
            dims, device = grad.sparse_dim(), grad.device
            self._sparse[name] = dims
            dense = packed(grad.detach().to_dense(), place)
            if not delivered:
                self._after.append(lambda: setattr(p, "grad", dense.to(device).to_sparse(dims)))
            return flat_at(dense, place)
        self._sparse.pop(name, None)
        if grad.layout is not torch.strided:
            raise TypeError(f"the gradient of {name!r} has layout {grad.layout}; use sparse COO")
        staged = packed(grad, place)
        if shared and shares_memory(staged, grad):
            staged = staged.clone()
        if shared or not shares_memory(staged, grad):
            # Or of other strides, such as channels_last, or on another device.
            self._copies.append(_Copy(p, grad, staged, shared, delivered))
        return flat_at(staged, place)

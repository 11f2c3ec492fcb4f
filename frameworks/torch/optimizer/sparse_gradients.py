"""Large sparse gradients of a reducer, which travel as indices and values.

Which those are is known after the first step, in which all travel as dense ones.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ringlet.job.process_sets import ProcessSet
from ringlet.ring.communicator import ReduceOp
from ringlet.ring.dtypes import Array
from ringlet.shared.gradients.gradient_settings import LARGE
from ringlet.torch.ops.handles import SparseHandle
from ringlet.torch.ops.sparse_allreduce import sparse_allreduce_async
from ringlet.torch.parameters.frozen import is_still
from ringlet.torch.tensors.placement import from_engine


class SparseGradients:
    """The sparse gradients of ``parameters``; none are gathered with ``as_dense``."""

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        op: ReduceOp,
        process_set: ProcessSet,
        as_dense: bool,
    ) -> None:
        self._parameters, self._as_dense = parameters, as_dense
        self._op, self._process_set = op, process_set
        self._label = ""  # the same on all ranks, while they gather anything
        self._chosen = as_dense  # whether it is known what is gathered
        self.dims: dict[str, int] = {}  # what is gathered, and not fused: its sparse dimensions
        self._gathering: dict[str, SparseHandle] = {}
        self._still: dict[str, torch.Tensor | None] = {}  # gradients of what was frozen

    def begin_epoch(self, label: str) -> None:
        """Gather nothing until it is chosen anew, among other ranks, under this ``label``."""
        self._label, self._chosen, self.dims = label, self._as_dense, {}

    def missing(self) -> list[str]:
        """Return what is still to be gathered in this step."""
        return [name for name in self.dims if name not in self._gathering]

    def gather(self, name: str, nothing: bool = False, owed: Array | None = None) -> None:
        """Hand in a gradient: no rows where ``nothing`` of it was used on this rank.

        With what is ``owed`` of it, flat.
        """
        p = self._parameters[name]
        if is_still(p):
            self._still[name] = p.grad
        grad = None if nothing else p.grad
        if grad is None or not grad.is_sparse:
            dense = torch.zeros_like(p) if grad is None else grad
            grad = dense.to_sparse(self.dims[name])
        if owed is not None:
            more = from_engine(owed, p.device).reshape(p.shape).to_sparse(self.dims[name])
            grad = (grad.detach() + more).to(grad.dtype)  # torch adds no sparse halves
        label = f"{self._label}.{name}"
        self._gathering[name] = sparse_allreduce_async(grad, label, self._op, self._process_set)

    def collect(self) -> None:
        """Wait for the results, which become the gradients of all parameters but frozen ones."""
        for name, handle in self._gathering.items():
            rows = handle.wait()
            self._parameters[name].grad = self._still.get(name, rows)

    def gather_nothing(self) -> None:
        """Take part in gathering what is missing of a step that is given up, with no rows."""
        for name in self.missing():
            self.gather(name, nothing=True)
        self.end()

    def end(self) -> None:
        """Let the next step begin; nobody waits any longer for what this one was gathering."""
        handles, self._gathering, self._still = list(self._gathering.values()), {}, {}
        for handle in handles:
            handle.forget()

    def choose(self, rows: Mapping[str, int]) -> bool:
        """After the first step, choose what is gathered from now on; whether there is any.

        Of ``rows``, all ranks' sparse gradients by name, with their sparse dimensions.
        """
        if self._chosen:
            return False
        self._chosen = True
        self.dims = {n: dims for n, dims in rows.items() if self._parameters[n].numel() >= LARGE}
        return bool(self.dims)

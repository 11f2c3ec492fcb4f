"""DistributedOptimizer: reduces gradients as backward produces them, then steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, TypeVar

import torch

from ringlet.compressors.routes import Routes, Spec
from ringlet.ring.communicator import ReduceOp
from ringlet.torch.naming import Named, name_parameters
from ringlet.torch.reducer import Reducer

Opt = TypeVar("Opt", bound=torch.optim.Optimizer)


class _Distributed:
    """What DistributedOptimizer adds to the class of the optimizer that it wraps."""

    param_groups: list[dict[str, Any]]
    state: Any
    _ringlet: Reducer
    _ringlet_original: Any
    _ringlet_synchronized: bool
    _ringlet_skip: bool

    def synchronize(self) -> None:
        """Wait until all gradients are reduced, for example to clip them before ``step``."""
        self._ringlet.synchronize(self.param_groups)
        self._ringlet_synchronized = True

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Step without synchronising again, after a ``synchronize`` of one's own."""
        self._ringlet_skip = True
        try:
            yield
        finally:
            self._ringlet_skip = False

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Synchronise, then take the wrapped optimizer's step.

        With a ``closure``, every evaluation of it is followed by a synchronisation, and the loss
        that it returns is reduced like the gradients.
        """
        inner: Any = super()
        # A scheduler that was made for the original asks whether that has stepped.
        self._ringlet_original._opt_called = True
        if closure is not None:

            def synchronized() -> Any:
                with torch.enable_grad():
                    loss = closure()
                self.synchronize()
                return self._ringlet.agreed(loss)

            try:
                return inner.step(synchronized)
            finally:
                self._ringlet_synchronized = False
        if not self._ringlet_skip:
            if self._ringlet_synchronized:
                warnings.warn(
                    "step() after synchronize() reduces the gradients a second time; write "
                    "'with optimizer.skip_synchronize(): optimizer.step()'",
                    stacklevel=2,
                )
            self.synchronize()
        self._ringlet_synchronized = False
        return inner.step()

    # torch wraps `step` for profiling and step hooks; the step inside is wrapped already.
    step.hooked = True  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients; RuntimeError while they are being reduced."""
        if self._ringlet.in_flight:
            raise RuntimeError(
                "zero_grad() between backward() and step(): the gradients are being reduced. "
                "Call it after step(), or synchronize() first"
            )
        inner: Any = super()
        inner.zero_grad(set_to_none=set_to_none)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load state and hyper-parameters, of this rank's compressors nothing."""
        inner: Any = super()
        inner.load_state_dict(state_dict)
        # Loading replaces both; a scheduler made for the original goes on setting its groups.
        self._ringlet_original.param_groups = self.param_groups
        self._ringlet_original.state = self.state

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change how many backward passes add up before gradients are reduced."""
        self._ringlet.set_passes(passes)

    def set_compression(self, compression: Spec | Routes) -> None:
        """Compress differently from the next step on; all ranks call it alike.

        Residuals carry over to compressors with error feedback; whatever else the old compressors
        remembered is forgotten. Raises RuntimeError between ``backward`` and ``step``.
        """
        self._ringlet.set_compression(compression)

    def residual_norm(self) -> float:
        """Return the Euclidean norm of what compression holds back on this rank."""
        return self._ringlet.residual_norm()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a DistributedOptimizer cannot be copied or pickled: it is tied to this process's "
            "parameters and peers. Copy or save optimizer.state_dict()"
        )


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: Opt,
    named_parameters: Named | None = None,
    compression: Spec | Routes = None,
    backward_passes_per_step: int = 1,
    op: ReduceOp = ReduceOp.AVERAGE,
    gradient_predivide_factor: float = 1.0,
) -> Opt:
    """Return ``optimizer`` with gradients reduced over all ranks before every step. Collective.

    The result is an instance of a subclass of the optimizer's class that shares its parameter
    groups and state; use it instead of the original. Wrapping the original again replaces it.

    - ``named_parameters``: ``model.named_parameters()``.
    - ``compression``: a spec such as ``"topk(ratio=0.01) | ef"``, a Compressor, or a mapping from
      name patterns to specs, first match first: ``{"*.bias": "none", "*": "int8 | ef"}``.
    - ``backward_passes_per_step``: passes whose gradients are summed before they are reduced.
    - ``op``: Average or Sum.
    - ``gradient_predivide_factor``: divide by this before the sum and by size / this after it.

    Raises Mismatch, the same on every rank, when ranks hold different parameters or arguments;
    ValueError for names that do not fit the parameters; SpecError for a bad ``compression``.
    """
    if isinstance(optimizer, _Distributed):
        raise ValueError(
            "this optimizer is a DistributedOptimizer already; wrap the original optimizer"
        )
    named = name_parameters(optimizer, named_parameters)
    reducer = Reducer(
        named, compression, backward_passes_per_step, ReduceOp(op), gradient_predivide_factor
    )
    base = type(optimizer)
    cls: Any = type(base.__name__, (_Distributed, base), {"__doc__": base.__doc__})
    distributed: Any = cls.__new__(cls)
    distributed.__dict__.update(optimizer.__dict__)
    # A scheduler made for the original has wrapped its step on the instance; ours must be found.
    distributed.__dict__.pop("step", None)
    distributed._ringlet = reducer
    distributed._ringlet_original = optimizer
    distributed._ringlet_synchronized = False
    distributed._ringlet_skip = False
    result: Opt = distributed
    return result

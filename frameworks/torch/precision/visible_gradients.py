"""Gradients that a caller of ``synchronize`` is shown, and may change before ``step``.

What the optimizer steps on are masters' gradients. The model's, of 16 bits, are copies of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

Pairs = Mapping[str, tuple[torch.nn.Parameter, torch.nn.Parameter]]  # the model's, its master


class Shown:
    """What was shown of one step, with torch's counts of changes in place.

    ``scaled`` tells whether there is a loss scale, which shown gradients are free of.
    """

    def __init__(self, scaled: bool) -> None:
        self._scaled = scaled
        self._seen: list[tuple[str, torch.nn.Parameter, torch.Tensor, int]] = []

    def show(self, pairs: Pairs, wide: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        """Copy masters' gradients to the model, and note these and those of ``wide`` parameters."""
        for p, master in pairs.values():
            if p.grad is not None and master.grad is not None:
                p.grad = master.grad.to(p.dtype) if p.grad.is_sparse else p.grad.copy_(master.grad)
        own = [*((name, p) for name, (p, _) in pairs.items()), *wide]
        self._seen = [(n, p, p.grad, p.grad._version) for n, p in own if p.grad is not None]

    def forget(self) -> None:
        """Care for what was shown no more."""
        self._seen = []

    def see_changes(self, pairs: Pairs) -> None:
        """Take over what the caller has changed in shown gradients, such as by clipping them.

        Raises RuntimeError under a loss scale: there 16 bits do not hold what was unscaled.
        """
        seen, self._seen = self._seen, []
        for name, p, grad, version in seen:
            if name not in pairs or (p.grad is grad and grad._version == version):
                continue
            if self._scaled:
                raise RuntimeError(
                    f"the gradient of {name!r} was changed after synchronize(), but the optimizer "
                    "steps on float32 masters: clip optimizer.master_parameters() instead of "
                    "model.parameters()"
                )
            pairs[name][1].grad = None if p.grad is None else p.grad.detach().float()

    def refuse_mixtures(self) -> None:
        """Raise RuntimeError where backward has added to gradients that were shown unscaled."""
        seen, self._seen = self._seen, []
        for name, p, grad, _ in seen:
            if self._scaled and p.grad is grad:
                raise RuntimeError(
                    f"backward() has added to the gradient of {name!r} after synchronize(), which "
                    "had taken the loss scale off: call step() or zero_grad() in between, or "
                    "accumulate with backward_passes_per_step"
                )

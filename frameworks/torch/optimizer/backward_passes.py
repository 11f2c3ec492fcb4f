"""What backward brings in one step: passes, counted by parameter, and gradients as they came."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ringlet.shared.gradients.accumulation import check_passes
from ringlet.torch.optimizer.step_misuse import too_many_passes
from ringlet.torch.tensors.shared_storage import address


class BackwardPasses:
    """The backward passes of each step over ``parameters``, by name: ``passes`` make it complete.

    A gradient is ``noted`` once it is complete, and must then stay what it is: see ``changed``.
    """

    def __init__(self, parameters: Mapping[str, torch.nn.Parameter], passes: Any) -> None:
        self._parameters = parameters
        self.noted: dict[str, tuple[torch.Tensor, int]] = {}  # with torch's counts of changes
        self.expect(passes)

    def expect(self, passes: Any) -> None:
        """Expect ``passes`` in each step, from this one on: see ``check_passes``."""
        self._passes = check_passes(passes)
        self._left = dict.fromkeys(self._parameters, self._passes)

    def count(self, name: str, p: torch.Tensor) -> bool:
        """Count a pass of ``p``; if it was the last one, note its gradient, and return True.

        RuntimeError for one more than the last.
        """
        left = self._left
        now = left[name] = left[name] - 1
        if now > 0:
            return False
        if now < 0:
            raise RuntimeError(too_many_passes(name, self._passes))
        if (grad := p.grad) is not None:
            self.noted[name] = grad, grad._version
        return True

    def note(self, name: str, grad: torch.Tensor | None) -> None:
        """Note a gradient whose passes are not counted, if there is one."""
        if grad is not None:
            self.noted[name] = grad, grad._version

    def changed(self) -> str | None:
        """Return a gradient that was written to, or replaced, since it was noted, if any was."""
        last: dict[int, int] | None = None
        for name, (grad, version) in self.noted.items():
            if self._parameters[name].grad is not grad:
                return name
            if grad._version == version:
                continue
            last = self._last_changes() if last is None else last
            if grad.layout is not torch.strided or grad._version != last[address(grad)]:
                return name
        return None

    def begin(self) -> None:
        """Begin a new step."""
        self._left, self.noted = dict.fromkeys(self._parameters, self._passes), {}

    def _last_changes(self) -> dict[int, int]:
        """Return the latest change that was noted in each storage, by its address.

        Views of one buffer share torch's count, which backward moves on for each of them.
        """
        last: dict[int, int] = {}
        for grad, version in self.noted.values():
            if grad.layout is torch.strided:
                last[address(grad)] = max(version, last.get(address(grad), 0))
        return last

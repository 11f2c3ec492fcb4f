"""Which compressor each parameter of a sharded model gets, by its name in the model."""

from __future__ import annotations

from typing import Any

import torch

from ringlet.compressors import Compressor, NoCompression, Router
from ringlet.compressors.specs.edition import edition
from ringlet.torch.parallel.fsdp_params import placed
from ringlet.torch.parameters.naming import routed, warn_of_unmatched, wrapped_in


class FsdpRoutes:
    """A ``router`` for the parameters of ``module``.

    ``unknown`` is what elements get of which nobody can say to which parameters they belong: the
    one compressor of all, or none where names decide.
    """

    def __init__(self, router: Router, module: torch.nn.Module) -> None:
        self._router = router
        self.unknown = NoCompression() if router.by_name else router("")
        self._modules: dict[int, list[str]] = {}
        for name, each in module.named_modules(remove_duplicate=False):
            self._modules.setdefault(id(each), []).append(name)
        self._depth = wrapped_in(name for name, _ in module.named_parameters())
        self._asked: dict[str, None] = {}

    @property
    def compressors(self) -> list[Compressor]:
        """Those that some parameter may get."""
        return self._router.compressors

    @property
    def compresses(self) -> bool:
        """Whether any parameter can be compressed."""
        return any(not isinstance(each, NoCompression) for each in self.compressors)

    def of(self, owner: torch.nn.Module, name: str) -> Compressor:
        """Return the compressor of what ``owner``, a module of the model, calls ``name``."""
        prefixes = self._modules.get(id(owner), [""])
        names = [f"{prefix}.{name}" if prefix else name for prefix in prefixes]
        self._asked.update(dict.fromkeys(names))
        return routed(self._router, names[0], self._depth)

    def of_param(self, param: Any) -> Compressor:
        """Return the compressor of one of FSDP2's parameters, an FSDPParam of torch's."""
        info = param._module_info
        return self.of(info.module, info.param_name)

    def of_shards(self, module: Any) -> dict[str, Compressor]:
        """Return the compressors of an FSDP2 module's own parameters, by their ``span_key``."""
        return {key: self.of_param(param) for key, _, param in placed(module)}

    def warn(self) -> None:
        """Warn of patterns that no parameter has matched which was asked for."""
        warn_of_unmatched(self._router, self._asked)


def described(router: Router) -> str:
    """Return what ranks compare: specs, and which sources their plugins have."""
    plugins = dict.fromkeys(filter(None, map(edition, router.compressors)))
    return f"{router} ({', '.join(plugins)})" if plugins else str(router)

"""Which parameters one of FSDP2's reductions is of, and over how many ranks it goes."""

from __future__ import annotations

from collections.abc import Iterator
from types import FrameType
from typing import Any, NamedTuple


class Reduced(NamedTuple):
    """The parameters of a reduction, of all that an FSDP module's group has.

    ``spans`` are where a rank's padded shards of them begin and end among the shards of all, and
    ``shapes`` those of these shards; ``group`` is the number of the group in its module. ``every``
    has the spans of all that may have a gradient, of which some are left out where a step does not
    use them.
    """

    group: int
    spans: tuple[tuple[int, int], ...]
    shapes: tuple[tuple[int, ...], ...] = ()
    every: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        told = [f"{start}:{stop}" for start, stop in self.spans]
        return f"{self.group}.{','.join(told)}"


def reduced(module: Any, n: int, frame: FrameType) -> Reduced | None:
    """Return what the reduction of ``n`` elements a rank is of; None if that is not known.

    FSDP hands over one flat tensor, and leaves out parameters without a gradient. Which these are
    is known to its function alone, whose ``frame`` is given.
    """
    present = frame.f_locals.get("fsdp_params")
    ids = {id(param) for param in present} if isinstance(present, list) else set()
    for number, group in enumerate(param_groups(module)):
        every = list(_placed(group))
        found = [each for each in every if id(each[0]) in ids]
        for chosen in (found, [] if ids else every):
            if chosen and sum(stop - start for _, (start, stop), _ in chosen) == n:
                _, spans, shapes = zip(*chosen, strict=True)
                may = (s for p, s, _ in every if p.sharded_param.requires_grad or s in spans)
                return Reduced(number, spans, shapes, tuple(may))
    return None


def placed(module: Any) -> Iterator[tuple[str, int, Any]]:
    """Yield the ``span_key`` of each parameter, how many elements a rank's shard has, and it."""
    for number, group in enumerate(param_groups(module)):
        for param, (start, stop), _ in _placed(group):
            yield span_key(number, start, stop), stop - start, param


def lengths(module: Any) -> dict[str, int]:
    """Return how many elements a rank's shard of each parameter has, by ``span_key``."""
    return {key: n for key, n, _ in placed(module)}


def span_key(group: int, start: int, stop: int) -> str:
    """Return what names a parameter's shard in its module, whichever others are left out."""
    return f"{group}.{start}:{stop}"


def _placed(group: Any) -> Iterator[tuple[Any, tuple[int, int], tuple[int, ...]]]:
    """Yield each parameter of a group, where its padded shard is among those of all, its shape."""
    start = 0
    for param in group.fsdp_params:
        shape = param.padded_sharded_param_size
        yield param, (start, start + shape.numel()), tuple(shape)
        start += shape.numel()


def param_groups(module: Any) -> Iterator[Any]:
    """Yield what torch keeps of each group of parameters that an FSDP module reduces at once."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch before 2.11 has one
        groups = [group] if (group := getattr(state, "_fsdp_param_group", None)) else []
    yield from groups


def torchs_own(module: Any, kept: str, default: Any) -> Any:
    """Return how ``module`` communicates where nobody compresses: what torch keeps, or a user."""
    found = next((getattr(group, kept, None) for group in param_groups(module)), None)
    return getattr(found, "own", found) or default


def levels(module: Any) -> tuple[int, int]:
    """Return over how many ranks torch shards an FSDP module, and over how many replicas it is."""
    meshes = [group.mesh_info for group in param_groups(module)]
    shards = max((getattr(mesh, "shard_mesh_size", 1) for mesh in meshes), default=1)
    return shards, max((getattr(mesh, "replicate_mesh_size", 1) for mesh in meshes), default=1)


def held(module: Any) -> Iterator[tuple[int, int]]:
    """Yield which shard this rank holds of each group of an FSDP module, and of how many."""
    for group in param_groups(module):
        mesh = group.mesh_info
        yield getattr(mesh, "shard_mesh_rank", 0), getattr(mesh, "shard_mesh_size", 1)

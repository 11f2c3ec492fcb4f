"""Which compressors a loss scale endangers: an overflow must not reach what they remember."""

from __future__ import annotations

from ringlet.compressors import Router
from ringlet.precision.policy import Policy


def remembering(router: Router) -> list[str]:
    """Return the compressors that remember something of a step, which an overflow would spoil."""
    return [str(c) for c in router.compressors if c.traits().stateful]


def unscaled_first(router: Router) -> bool:
    """Whether a loss scale has to be off before gradients are compressed.

    That is where a compressor remembers them, or goes by absolute sizes.
    """
    return any(c.traits().stateful or not c.traits().scales for c in router.compressors)


def guards(policy: Policy, router: Router) -> bool:
    """Whether gradients that a caller has scaled need a watch over what compressors remember.

    That is where ``policy`` has a loss scale and a compressor of ``router`` remembers: an overflow
    must not get into its memory. Raises ValueError where that scale changes: what is remembered is
    in its units, and has to be told of the change.
    """
    fed = remembering(router)
    if not (policy.scale.watches and fed):
        return False
    if policy.scale.after(overflow=True) != policy.scale:
        raise ValueError(
            f"policy {policy.name!r} has a loss scale that changes, and {fed[0]!r} remembers "
            "gradients in units of it, of which a tape knows nothing. Take DistributedOptimizer "
            "with this policy, or a fixed scale such as 'fp16(static=1024)', or a compressor that "
            "remembers nothing"
        )
    return True

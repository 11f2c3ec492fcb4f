"""What carries gradients among the ranks of a process group: the job, or an engine beside it.

A program may have several groups, such as one for experts beside one for what all ranks share.
"""

from __future__ import annotations

import atexit
import gc
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ringlet.fusion.negotiation.validation import named_ranks
from ringlet.job.session import Runtime, current, init, is_initialized
from ringlet.job.settings import limits_from, wishes_from
from ringlet.ring.process_owner import is_lent
from ringlet.ring.rendezvous.torch_jobs import connect_group
from ringlet.torch.elastic.epoch_group import EpochGroup

log = logging.getLogger("ringlet")

_own: dict[Any, Runtime] = {}  # of groups whose ranks are not the job's


def runtime_of(group: Any = None) -> Runtime:
    """Return the runtime of the ranks of ``group`` (default: torch's). Collective among them.

    It is the job's where that has the same ranks. Where none of them is in a job yet, these ranks
    become one. Otherwise they get a runtime beside it, which lives as long as the process.
    """
    if isinstance(group, EpochGroup):
        return group.runtime
    check_group(group, "process_group")
    if not (dist.is_available() and dist.is_initialized()):
        return current() if is_initialized() else init(comm=connect_group(group))
    known = current() if is_initialized() else None
    mine = None if known is None else (known.identity, known.size)
    told: list[Any] = [None] * max(dist.get_world_size(group), 1)
    if len(told) > 1:
        with watched(group, "in hvd.ddp_hook()"):
            dist.all_gather_object(told, mine, group)
    else:
        told = [mine]
    if all(each is None for each in told):
        return init(comm=connect_group(group))
    if known is not None and all(each == (known.identity, len(told)) for each in told):
        return known
    group = dist.group.WORLD if group is None else group
    found = _own.get(group)
    if found is None:
        env = os.environ
        found = _own[group] = Runtime(connect_group(group), limits_from(env), wishes_from(env))
        atexit.register(found.close)
    return found


def check_group(group: Any, name: str) -> None:
    """Raise TypeError for what is no process group of torch's, such as a list of ranks."""
    if group is not None and not hasattr(group, "size"):
        raise TypeError(
            f"{name} is what torch.distributed.new_group(ranks) returns on the ranks that are in "
            f"it, not {group!r}"
        )


def refuse_other_ranks(state: object, group: Any) -> None:
    """Raise RuntimeError where the model whose hook has ``state`` is of other ranks than ``group``.

    DDP tells a hook neither its group nor itself, so it is looked for. After ``gc.freeze`` it is
    not found.
    """
    ours = _ranks(group)
    for found in gc.get_objects():
        if not issubclass(type(found), DistributedDataParallel):
            continue
        if any(each is state for _, each in found.__dict__.get("_comm_hooks", ())):
            theirs = _ranks(found.process_group)
            if ours and theirs and ours != theirs:
                raise RuntimeError(
                    f"DistributedDataParallel reduces over {named_ranks(theirs)}, but its "
                    f"ddp_hook over {named_ranks(ours)}: pass the same process_group to both"
                )


def _ranks(group: Any) -> list[int]:
    """Return the ranks of a group of torch's; none of another, which is of all ranks of a job."""
    if isinstance(group, EpochGroup) or not (dist.is_available() and dist.is_initialized()):
        return []
    return sorted(dist.get_process_group_ranks(dist.group.WORLD if group is None else group))


@contextmanager
def watched(group: Any, where: str) -> Iterator[None]:
    """Warn when ranks of ``group`` have not come for long: torch's own time-out is half an hour.

    End this process where the stall inspector would: nothing interrupts a collective of torch's.
    """
    limits = limits_from(os.environ)
    others = f"the other {dist.get_world_size(group) - 1} rank(s) of its process group"

    def told(seconds: float) -> str:
        return (
            f"rank {dist.get_rank()} has waited {seconds:g} s {where} for {others}: all of them "
            "have to call it. One that does not call it waits for these in its first step"
        )

    timers = []
    for seconds, act in ((limits.stall_warning, log.warning), (limits.stall_shutdown, _end)):
        if seconds > 0:
            timers.append(threading.Timer(seconds, act, (told(seconds),)))
            timers[-1].daemon = True
            timers[-1].start()
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()


def _end(why: str) -> None:
    if is_lent():
        log.error("%s: end this worker", why)
        return
    variable = "RINGLET_STALL_SHUTDOWN_TIME_SECONDS"
    print(f"ringlet: {why}; {variable} ends such a wait, so this rank ends", file=sys.stderr)
    sys.stderr.flush()
    os._exit(1)  # as the cause: the other ranks find that it is gone

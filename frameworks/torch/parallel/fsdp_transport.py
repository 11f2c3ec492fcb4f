"""How what FSDP2 exchanges travels when it is compressed: staged, or from GPU to GPU."""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from ringlet.fusion import CompressionFailed
from ringlet.fusion.devices.host import Place
from ringlet.job.elastic import refuse_in_elastic_job
from ringlet.job.process_sets import InvalidArgument
from ringlet.job.session import agreed_places, agreed_seed
from ringlet.ring.errors import Mismatch
from ringlet.ring.rendezvous.torch_jobs import connect_group
from ringlet.torch.parallel.backward_outcome import (
    BackwardFailure,
    BackwardOutcome,
    Stage,
    compression_failed,
)
from ringlet.torch.parallel.group_runtimes import watched


def check_model(module: Any, caller: str) -> None:
    """Raise TypeError for what is no module, InvalidArgument where the job is elastic."""
    if not isinstance(module, torch.nn.Module):
        what = type(module).__name__
        raise TypeError(f"the first argument of {caller} is the model, not a {what}")
    refuse_in_elastic_job(
        caller,
        "a rank that is lost takes its shard of the parameters along",
        "use DistributedOptimizer with the whole model on every rank, or start the job without "
        "--min-np, --max-np and --host-discovery-script, and again from a checkpoint",
    )


def sharded_modules(module: torch.nn.Module, hook: str, caller: str) -> list[tuple[str, Any]]:
    """Return the FSDP2 modules inside ``module`` by name; each has a method ``hook``.

    Raises InvalidArgument where there is none, or torch is too old to have that.
    """
    if not hasattr(_kind(), hook):
        raise InvalidArgument(
            f"{caller} needs an FSDP2 with {hook}(), which torch {torch.__version__} lacks; "
            "install a newer torch"
        )
    modules = [(n, m) for n, m in module.named_modules() if is_sharded(m)]
    if not modules:
        raise InvalidArgument("there is no FSDP module here; call fully_shard(model) first")
    return modules


def is_sharded(module: torch.nn.Module) -> bool:
    """Whether a module is FSDP2's."""
    kind = _kind()
    return kind is not None and isinstance(module, kind)


def _kind() -> Any:
    """Return the class of FSDP2's modules; None where torch is too old to have one."""
    return getattr(importlib.import_module("torch.distributed.fsdp"), "FSDPModule", None)


def labelled(modules: Iterable[tuple[str, Any]]) -> list[tuple[str, Any]]:
    """Return FSDP2 modules with names to remember by, which the outermost one needs, too."""
    pairs = list(modules)
    whole = "(root)" if any(name == "root" for name, _ in pairs) else "root"
    return [(name or whole, each) for name, each in pairs]


class GroupTransport:
    """How tensors travel in one process group: over what, and from which places.

    All of its ranks draw random numbers by the ``seed`` of the first.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        # FSDP calls in the order in which it would use the group itself, on the same thread.
        self.comm = connect_group(group, own=False)
        self.seed = agreed_seed(self.comm)
        self.places = {place.name: place for place in (Place(), *agreed_places(self.comm))}
        self.users: dict[Any, None] = {}  # the reductions that have used it
        self.planned = 0  # the backward pass in which ranks have agreed on their schedules

    def place(self, name: str) -> Place | None:
        """Return a place where gradients can lie; None if there is none of that name."""
        return self.places.get(name)


class GroupTransports:
    """The transports of the process groups that one model is sharded over.

    All of a group's ranks compress with ``spec``. ``module`` was given to the ``caller``, and had
    no FSDP2 modules inside but the ``known`` ones then. ``gathers`` tells whether parameters are
    compressed too.
    """

    def __init__(
        self,
        spec: str,
        module: torch.nn.Module,
        known: Iterable[Any],
        caller: str = "compress_fsdp",
        gathers: bool = False,
    ) -> None:
        self.gathers = gathers
        self.owed: CompressionFailed | None = None  # of parameters, which others do not know of
        self._spec, self._caller = spec, caller
        self._module: weakref.ref[torch.nn.Module] = weakref.ref(module)  # which holds this
        self._known, self._looked = weakref.WeakSet(known), False
        self.outcome = BackwardOutcome(caller)
        self._made: dict[Any, GroupTransport] = {}

    def of(self, group: dist.ProcessGroup) -> GroupTransport:
        """Return the transport of ``group``; collective the first time.

        Raises Mismatch, on all of its ranks, where they compress otherwise: they would take each
        other's payloads for their own.
        """
        transport = self._made.get(group)
        if transport is None:
            with watched(group, f"in the first step after hvd.{self._caller}()"):
                transport = GroupTransport(group)
                specs = transport.comm.allgather_bytes(self._spec.encode())
                told = [each.decode() for each in specs]
            if len(set(told)) > 1:
                ranks = dist.get_process_group_ranks(group)
                shown = "; ".join(f"rank {r}: {t}" for r, t in zip(ranks, told, strict=True))
                raise Mismatch(
                    f"{self._caller}: compressors differ between ranks ({shown}); pass the same on "
                    "all ranks"
                )
            self._made[group] = transport
        return transport

    def of_all(
        self, group: dist.ProcessGroup, frame: FrameType
    ) -> tuple[GroupTransport, GroupTransport | None]:
        """Return the transport of ``group``, and of its replicas where torch averages over some.

        ``frame`` is that of FSDP's function. Raises as ``of`` does.
        """
        transport, replicas = self.of(group), frame.f_locals.get("all_reduce_group")
        return transport, None if replicas is None else self.of(replicas)

    def expect(self, transport: GroupTransport, replicas: GroupTransport | None = None) -> None:
        """Let ranks agree on what has failed when the backward pass at hand ends."""
        self.outcome.expect(transport.comm, None if replicas is None else replicas.comm)
        if (later := self.look()) is not None:
            self.outcome.note(later)
        if self.owed is not None:
            self.outcome.note(compression_failed(self.owed), self.owed.__cause__)
            self.owed = None

    def look(self) -> BackwardFailure | None:
        """Return a failure where modules have been sharded since, which nothing compresses."""
        module = self._module()
        if self._looked or module is None:
            return None
        for name, each in module.named_modules():
            if is_sharded(each) and each not in self._known:
                return BackwardFailure(
                    Stage.PLAN,
                    InvalidArgument.__name__,
                    f"{self._caller}: {name or 'the module'} was sharded by fully_shard "
                    f"afterwards, and travels uncompressed; call {self._caller} when all modules "
                    "are sharded",
                )
        self._looked = True
        return None

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Put what the caller does in order with the work at all places."""
        with ExitStack() as stack:
            for transport in self._made.values():
                for place in transport.places.values():
                    stack.enter_context(place.at_work())
            yield

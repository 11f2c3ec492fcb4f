"""Horovod's RayExecutor: actors that are the ranks of a job, from ``start`` to ``shutdown``."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ringlet.job.placed_call import (
    GRACE,
    Account,
    account_of_error,
    gathered,
    packed,
    placed_rank,
    results,
    unpacked,
)
from ringlet.ray.cluster import check_version, inside_the_cluster, resources, store_host
from ringlet.ray.elastic import ElasticRayExecutor, ElasticSettings
from ringlet.ring.callers import public
from ringlet.ring.elastic.rules import checked_rules
from ringlet.ring.errors import LaunchError
from ringlet.ring.launch.signed_pickle import pickler
from ringlet.ring.placed.store_server import StoreServer
from ringlet.ring.placed.ticket import Ticket, tickets

_NO_OBJECTS = "ranks that come and go keep no objects, and no references to what they will return"


@dataclass(frozen=True)
class RaySettings:
    """How long things may take, in seconds, and the network interfaces to use."""

    timeout_s: float = 30.0
    placement_group_timeout_s: float = 100.0
    nics: tuple[str, ...] = ()


class RankWorker:
    """An actor that is one rank; an object of the user's may live in it."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._executable: Any = None
        self._joined = False

    def place(self) -> tuple[str, str, list[str]]:
        """Return the node's id, the host's name, and the GPUs that Ray has given this worker."""
        context = ray.get_runtime_context()
        gpus = context.get_accelerator_ids().get("GPU", [])
        return context.get_node_id(), socket.gethostname(), [str(gpu) for gpu in gpus]

    def enter(self, ticket: Ticket) -> None:
        """Become the rank of ``ticket``."""
        self._stack.close()
        self._stack.enter_context(placed_rank(ticket))
        self._rank, self._joined = ticket.standing.rank, True

    def build(self, call: bytes) -> Account:
        """Make the user's object."""
        made, args, kwargs = unpacked(call)

        def build() -> None:
            self._executable = made(*args, **kwargs)

        return self._account(build)

    def call(self, call: bytes, on_executable: bool) -> Account:
        """Call the user's function, with the user's object if ``on_executable``."""

        def called() -> Any:
            fn, args, kwargs = unpacked(call)
            return fn(self._executable) if on_executable else fn(*args, **kwargs)

        return self._account(called)

    def result(self, call: bytes) -> Any:
        """Call the user's function; raise WorkerFailed if it does."""
        (value,) = results([self.call(call, False)])
        return value

    def _account(self, fn: Callable[[], Any]) -> Account:
        if not self._joined:  # it would be rank 0 of 1
            text = "an earlier call of run_remote failed on this rank, which has left the job"
            return account_of_error(self._rank, LaunchError(text))
        try:
            return Account(self._rank, bytes(pickler().dumps(fn())))
        except (Exception, SystemExit) as error:  # after the latter Ray would end this actor
            if isinstance(error, SystemExit) and error.code in (None, 0):
                return Account(self._rank, bytes(pickler().dumps(None)))
            told: BaseException = error
            self._joined = False
            try:
                # The other ranks hear of it.
                self._stack.pop_all().__exit__(type(error), error, error.__traceback__)
            except Exception as other:
                told = other
            assert isinstance(told, Exception)
            return account_of_error(self._rank, told)

    def leave(self) -> None:
        """Be no rank any more."""
        self._stack.close()


class RayExecutor:
    """Ranks in actors of Ray; the arguments are those of Horovod's class.

    ``num_workers`` ranks are packed on few nodes, or take the bundles of the current placement
    group, unless ``use_current_placement_group`` is false; or ``num_workers_per_host`` of them are
    on each of ``num_hosts`` nodes. Each takes ``cpus_per_worker`` CPUs and, with ``use_gpu``,
    ``gpus_per_worker`` GPUs (None: 1). ``settings`` come from ``create_settings``; ``transport``
    is gloo (None) or nccl. With ``min_workers`` or ``max_workers`` ranks come and go with Ray's
    nodes, as those of ``ElasticRayExecutor``: then ``run`` alone calls functions. Raises ValueError
    or LaunchError for what contradicts.
    """

    def __init__(
        self,
        settings: RaySettings | None = None,
        num_workers: int | None = None,
        num_hosts: int | None = None,
        num_workers_per_host: int = 1,
        cpus_per_worker: int = 1,
        use_gpu: bool = False,
        gpus_per_worker: int | None = None,
        use_current_placement_group: bool = True,
        min_workers: int | None = None,
        max_workers: int | None = None,
        reset_limit: int | None = None,
        cooldown_range: Sequence[int] | None = None,
        elastic_timeout: int = 600,
        override_discovery: bool = True,
        transport: str | None = None,
    ) -> None:
        check_version()
        if gpus_per_worker is not None and not use_gpu:
            raise ValueError("gpus_per_worker is given, but use_gpu is false")
        counts = {
            "num_workers": num_workers,
            "num_hosts": num_hosts,
            "num_workers_per_host": num_workers_per_host,
            "cpus_per_worker": cpus_per_worker,
            "gpus_per_worker": gpus_per_worker,
        }
        for name, count in counts.items():
            if count is not None and count < 1:
                raise ValueError(f"{name}={count}: there has to be at least one")
        self.settings = settings or self.create_settings()
        self._elastic: ElasticRayExecutor | None = None
        if min_workers is not None or max_workers is not None:
            if num_hosts is not None:
                raise ValueError("num_hosts: give num_workers where ranks come and go, or neither")
            rules = checked_rules(
                num_workers, min_workers, max_workers, reset_limit, elastic_timeout, cooldown_range,
                named=_workers,
            )  # fmt: skip
            self._size = rules.np
            self._elastic = ElasticRayExecutor(
                ElasticSettings(rules, self.settings.timeout_s, self.settings.nics),
                use_gpu,
                cpus_per_worker,
                gpus_per_worker,
                transport=transport,
            )
            return
        for name, value in {"reset_limit": reset_limit, "cooldown_range": cooldown_range}.items():
            if value is not None:
                raise LaunchError(f"{name} is for ranks that come and go: give min_workers as well")
        if num_workers is not None and num_hosts is None:
            self._size = num_workers
        elif num_hosts is not None and num_workers is None:
            self._size = num_hosts * num_workers_per_host
        else:
            raise ValueError("give num_workers, or num_hosts (with num_workers_per_host)")
        self._hosts, self._per_host = num_hosts, num_workers_per_host
        self._takes: dict[str, float] = {"CPU": float(cpus_per_worker)}
        if use_gpu:
            self._takes["GPU"] = float(gpus_per_worker or 1)
        self._within_current = use_current_placement_group and num_hosts is None
        self._transport = transport
        self._env: dict[str, str] = {}
        self._group: PlacementGroup | None = None  # of our own
        self._server: StoreServer | None = None
        self._workers: list[Any] = []  # by rank
        self._places: list[tuple[str, str, list[str]]] = []

    @classmethod
    def create_settings(
        cls,
        timeout_s: float = 30.0,
        ssh_identity_file: str | None = None,
        ssh_str: str | None = None,
        placement_group_timeout_s: float = 100.0,
        nics: str | Sequence[str] | None = None,
        verbose: int = 1,
    ) -> RaySettings:
        """Return settings: seconds for workers to start, and for the cluster to have room.

        ``nics`` are network interfaces, in order of preference. Nothing here uses ssh, so what is
        said of it is not needed; nor is ``verbose``.
        """
        interfaces = nics.split(",") if isinstance(nics, str) else nics or ()
        return RaySettings(timeout_s, placement_group_timeout_s, tuple(interfaces))

    @property
    def num_workers(self) -> int:
        """How many ranks there are."""
        return self._size

    @public
    def start(
        self,
        executable_cls: Callable[..., Any] | None = None,
        executable_args: Sequence[Any] | None = None,
        executable_kwargs: Mapping[str, Any] | None = None,
        extra_env_vars: Mapping[str, str] | None = None,
    ) -> None:
        """Start the actors, and in each make an ``executable_cls``, if one is given.

        ``extra_env_vars`` are set for every rank. Raises TimeoutError when the cluster has no room
        within ``placement_group_timeout_s``, WorkerFailed when the class cannot be made.
        """
        inside_the_cluster()
        if self._elastic is not None:
            if executable_cls is not None:
                raise LaunchError(f"executable_cls: {_NO_OBJECTS}")
            self._elastic.start(extra_env_vars)
            return
        if self._workers:
            raise LaunchError("this RayExecutor has been started; call shutdown() first")
        self._env = dict(extra_env_vars or {})
        made = None
        if executable_cls is not None:
            made = packed(executable_cls, executable_args or (), executable_kwargs)
        try:
            self._place()
            self._join()
            if made is not None:
                self._all([worker.build.remote(made) for worker in self._workers])
        except BaseException:
            self.shutdown()
            raise

    @public
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        callbacks: Sequence[Any] | None = None,
    ) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on every rank; return what it returns, by rank.

        What ranks have initialised stays for the next call. Raises WorkerFailed, with the text of
        the traceback, when a rank raises or its worker ends; its cause is the exception. After
        that the ranks have to be initialised again.
        """
        if callbacks:
            raise LaunchError("callbacks: report by ray.train.report, under Ray Train")
        if self._elastic is not None:
            return self._elastic.run(fn, args=args or (), kwargs=kwargs)
        return self._call(packed(fn, args or (), kwargs), on_executable=False)

    @public
    def run_remote(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Do as ``run``, but return references of Ray's to the results, at once."""
        call = packed(fn, args or (), kwargs)
        return [worker.result.remote(call) for worker in self._started()]

    @public
    def execute(self, fn: Callable[[Any], Any]) -> list[Any]:
        """Call ``fn(executable)`` on every rank; return what it returns, by rank."""
        return self._call(packed(fn), on_executable=True)

    @public
    def execute_single(self, fn: Callable[[Any], Any]) -> Any:
        """Call ``fn(executable)`` on rank 0, and on no other; return what it returns."""
        (value,) = self._all([self._started()[0].call.remote(packed(fn), True)])
        return value

    def shutdown(self) -> None:
        """End the actors, and give their resources back. Idempotent."""
        if self._elastic is not None:
            self._elastic.shutdown()
            return
        workers, self._workers = self._workers, []
        if leaving := [worker.leave.remote() for worker in workers]:
            ray.wait(leaving, num_returns=len(leaving), timeout=GRACE)
        for worker in workers:
            ray.kill(worker)
        if self._server is not None:
            self._server.close()
            self._server = None
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None

    # Placing

    def _place(self) -> None:
        """Start an actor for each rank, in the order of their ranks."""
        group = get_current_placement_group() if self._within_current else None
        bundles = list(range(self._size))
        if group is not None:
            bundles = self._bundles_of(group)
        elif self._hosts is None:
            group = self._reserve([self._takes] * self._size, "PACK")
        else:
            host = {name: count * self._per_host for name, count in self._takes.items()}
            group = self._reserve([host] * self._hosts, "STRICT_SPREAD")
            bundles = [number for number in range(self._hosts) for _ in range(self._per_host)]
        actor = ray.remote(RankWorker)
        workers = [
            actor.options(
                num_cpus=self._takes["CPU"],
                num_gpus=self._takes.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=group, placement_group_bundle_index=bundle
                ),
            ).remote()
            for bundle in bundles
        ]
        self._workers = workers
        limit = self.settings.timeout_s
        try:
            places = ray.get([worker.place.remote() for worker in workers], timeout=limit)
        except GetTimeoutError:
            raise TimeoutError(
                f"{self._size} workers that take {self._asked(self._takes)} each did not start"
                f" within {limit:g} s (timeout_s); the cluster has {resources()}"
            ) from None
        # Ranks of a node follow each other.
        nodes = list(dict.fromkeys(node for node, _, _ in places))
        order = sorted(range(self._size), key=lambda i: nodes.index(places[i][0]))
        self._workers = [workers[i] for i in order]
        self._places = [places[i] for i in order]

    def _reserve(self, bundles: list[dict[str, float]], strategy: str) -> PlacementGroup:
        self._group = placement_group(bundles, strategy=strategy)
        limit = self.settings.placement_group_timeout_s
        if not self._group.wait(limit):
            spread = ", each on a node of its own" if strategy == "STRICT_SPREAD" else ""
            raise TimeoutError(
                f"the cluster has no room for {len(bundles)} times {self._asked(bundles[0])}"
                f"{spread}: it has {resources()}; given up after {limit:g} s"
                " (placement_group_timeout_s)"
            )
        return self._group

    def _bundles_of(self, group: PlacementGroup) -> list[int]:
        """Return a bundle of the current placement group for each rank."""
        found: list[int] = []
        for number, bundle in enumerate(group.bundle_specs):
            fits = min(int(bundle.get(name, 0) // count) for name, count in self._takes.items())
            found += [number] * fits
        if len(found) < self._size:
            raise LaunchError(
                f"the current placement group has room for {len(found)} workers that take"
                f" {self._asked(self._takes)} each, not for {self._size}; give"
                " use_current_placement_group=False for a group of their own"
            )
        return found[: self._size]

    @staticmethod
    def _asked(takes: Mapping[str, float]) -> str:
        return " and ".join(f"{count:g} {name}" for name, count in takes.items())

    # Joining and calling

    def _join(self) -> None:
        """Make the actors the ranks of a new job."""
        if self._server is not None:
            self._server.close()
        self._server = StoreServer(self._size, store_host(self.settings.nics))
        nodes = [node for node, _, _ in self._places]
        given = tickets(self._server, nodes, self._transport, self.settings.nics, self._env)
        entering = []
        for worker, ticket, node in zip(self._workers, given, nodes, strict=True):
            gpus = [gpu for other, _, own in self._places if other == node for gpu in own]
            entering.append(worker.enter.remote(ticket.with_gpus(gpus)))
        ray.get(entering)

    def _started(self) -> list[Any]:
        if self._elastic is not None:
            raise LaunchError(f"where ranks come and go, call run(): {_NO_OBJECTS}")
        if not self._workers:
            raise LaunchError("this RayExecutor has not been started: call start() first")
        return self._workers

    def _call(self, call: bytes, on_executable: bool) -> list[Any]:
        return self._all([worker.call.remote(call, on_executable) for worker in self._started()])

    def _all(self, calls: Sequence[Any]) -> list[Any]:
        """Return what the calls, of the first ranks, come to; after a failure, join anew."""
        found = gathered(dict(enumerate(calls)), _ended, self._account)
        accounts = [found[rank] for rank in sorted(found)]
        if all(account.value is not None for account in accounts):
            return results(accounts)
        if len(accounts) < len(calls) or any(account.ended for account in accounts):
            self.shutdown()  # somebody has gone, or does not notice that others have
        else:
            self._join()
        return results(accounts)

    def _account(self, rank: int, call: Any) -> Account:
        try:
            account: Account = ray.get(call)
        except RayActorError as error:
            host = self._places[rank][1]
            why = " ".join(str(error).split("\n")[0].split())
            text = f"has gone: its worker on {host} ended ({why})"
            if self._server is not None:
                self._server.fail(f"rank {rank} {text}")
            return Account(rank, ended=text)
        return account


def _workers(name: str) -> str:
    known = {"np": "num_workers", "min_np": "min_workers", "max_np": "max_workers"}
    return {**known, "start_timeout": "timeout_s"}.get(name, name)


def _ended(calls: Mapping[int, Any], seconds: float | None) -> list[int]:
    done, _ = ray.wait(list(calls.values()), num_returns=1, timeout=seconds)
    return [rank for rank, call in calls.items() if call in done]

"""Horovod's ElasticRayExecutor: ranks on Ray's nodes that come and go with them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.autoscaler.sdk import request_resources
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ringlet.ray.cluster import check_version, inside_the_cluster, store_host
from ringlet.ring.callers import public
from ringlet.ring.elastic.driver import Driver
from ringlet.ring.elastic.rules import Rules, checked_rules
from ringlet.ring.errors import LaunchError
from ringlet.ring.functions.elastic_run import elastic_results
from ringlet.ring.functions.parcels import packed_call, worker_command
from ringlet.ring.hosts.hosts import Host
from ringlet.ring.hosts.remote import AGENT, Reach
from ringlet.ring.processes.output import Printer

PERIOD = 1.0  # seconds between two looks at the cluster's nodes


class NodeAgent:
    """An actor that holds the resources of one rank, and the agent that starts it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, order: Mapping[str, Any]) -> int:
        """Have an agent obey ``order``; return its exit code once it has ended."""
        # Ranks run the Python of this worker, whatever that of the program is.
        own = f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ.get('PATH', '')}"
        self._process = subprocess.Popen(
            AGENT, stdin=subprocess.PIPE, start_new_session=True, env={**os.environ, "PATH": own}
        )
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        return self._process.wait()

    def leave(self) -> None:
        """Let the agent end, whose input is this process's to close."""
        if self._process is not None and self._process.stdin:
            self._process.stdin.close()


class StartedActor:
    """An actor, as the launcher of an elastic job sees what it has started."""

    def __init__(self, actor: Any, order: Mapping[str, Any]) -> None:
        self._actor = actor
        self._code: int | None = None
        self._run = actor.run.remote(order)

    def poll(self) -> int | None:
        """Return the agent's exit code, 1 where the actor has gone, None while it runs."""
        # Ray's control plane may restart: whoever runs says so to the launcher itself.
        with suppress(Exception):
            if self._code is None and ray.wait([self._run], timeout=0)[0]:
                try:
                    self._code = ray.get(self._run)
                except RayError:
                    self._code = 1
                ray.kill(self._actor)  # gives its resources back
        return self._code

    def part(self) -> None:
        """Close the agent's input, with which it ends."""
        if self._code is None:
            self._actor.leave.remote()

    def end(self, seconds: float) -> None:
        """Wait for its end so long, then kill it."""
        if self.poll() is None:
            ray.wait([self._run], timeout=max(0.0, seconds))
            ray.kill(self._actor)


class RayNodes:
    """The nodes of the cluster as hosts of an elastic job; a rank there takes ``takes``."""

    here: str | None = None  # this program's node is like the others
    secret: bytes | None = None

    def __init__(self, takes: Mapping[str, float], interfaces: Sequence[str] = ()) -> None:
        self.address = store_host(interfaces)
        self._takes = dict(takes)
        self._names: dict[str, str] = {}  # by node id
        self._next = 0.0
        self._known: list[Host] | None = None
        self._complaint = ""
        self._agent = ray.remote(NodeAgent)

    def look(self, now: float) -> tuple[list[Host] | None, str]:
        """Return the nodes where they are other than before, else None, and what to tell."""
        if now < self._next:
            return None, ""
        self._next = now + PERIOD
        try:
            nodes = ray.nodes()
        except Exception as error:  # Ray's control plane restarts, and ranks need nothing of it
            return None, self._complain(f"Ray does not answer ({error}); nodes stay as they were")
        found = []
        for node in nodes:
            has = node["Resources"]
            slots = min(int(has.get(name, 0) // count) for name, count in self._takes.items())
            if node["Alive"] and slots:
                found.append(Host(self._name(node["NodeID"], node["NodeManagerHostname"]), slots))
        if not found:
            asked = " and ".join(f"{count:g} {name}" for name, count in self._takes.items())
            return None, self._complain(f"no node is large enough for a rank, which takes {asked}")
        self._complaint = ""
        if found == self._known:
            return None, ""
        self._known = found
        return found, ""

    def _complain(self, text: str) -> str:
        """Return what is to be told, nothing if that was told last."""
        told, self._complaint = self._complaint, text
        return "" if told == text else text

    def _name(self, node: str, host: str) -> str:
        """Return a name for a node: its host's, with a number where that has several."""
        if node not in self._names:
            several = sum(name.partition("/")[0] == host for name in self._names.values())
            self._names[node] = f"{host}/{several}" if several else host
        return self._names[node]

    def patience(self, now: float) -> float | None:
        """Return the seconds until the next look."""
        return max(0.0, self._next - now)

    def start(self, host: str, order: Mapping[str, Any]) -> StartedActor:
        """Have an actor on ``host`` obey ``order`` once there is room for it.

        Raises LaunchError where Ray does not answer.
        """
        (node,) = (node for node, name in self._names.items() if name == host)
        try:
            actor = self._agent.options(
                num_cpus=self._takes["CPU"],
                num_gpus=self._takes.get("GPU", 0),
                max_concurrency=2,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            ).remote()
            return StartedActor(actor, order)
        except Exception as error:
            raise LaunchError(f"Ray starts nothing on {host}: {error}") from None


@dataclass(frozen=True)
class ElasticSettings:
    """How many ranks there may be, how long things may take, and the interfaces to use."""

    rules: Rules
    timeout_s: float
    nics: tuple[str, ...] = ()


def _named(name: str) -> str:
    known = {"np": "num_proc", "min_np": "min_num_proc", "max_np": "max_num_proc"}
    return {**known, "start_timeout": "timeout_s"}.get(name, name)


class ElasticRayExecutor:
    """Ranks on the nodes of Ray's cluster that come and go with them; arguments are Horovod's.

    Each rank takes ``cpus_per_slot`` CPUs and, with ``use_gpu``, ``gpus_per_slot`` GPUs (None: 1),
    and sees no other GPUs. ``env_vars`` are set for every rank; ``transport`` is gloo (None) or
    nccl. Nodes are found by asking Ray, whatever ``override_discovery`` says.
    """

    def __init__(
        self,
        settings: ElasticSettings,
        use_gpu: bool = False,
        cpus_per_slot: int = 1,
        gpus_per_slot: int | None = None,
        env_vars: Mapping[str, str] | None = None,
        override_discovery: bool = True,
        transport: str | None = None,
    ) -> None:
        check_version()
        if gpus_per_slot is not None and not use_gpu:
            raise ValueError("gpus_per_slot is given, but use_gpu is false")
        for name, count in {"cpus_per_slot": cpus_per_slot, "gpus_per_slot": gpus_per_slot}.items():
            if count is not None and count < 1:
                raise ValueError(f"{name}={count}: there has to be at least one")
        self._settings = settings
        self._takes: dict[str, float] = {"CPU": float(cpus_per_slot)}
        if use_gpu:
            self._takes["GPU"] = float(gpus_per_slot or 1)
        self._env, self._transport = dict(env_vars or {}), transport
        self._extra: dict[str, str] = {}
        self._started = False

    @staticmethod
    def create_settings(
        min_num_proc: int | None = None,
        max_num_proc: int | None = None,
        reset_limit: int | None = None,
        elastic_timeout: float = 600,
        timeout_s: float = 30.0,
        ssh_identity_file: str | None = None,
        nics: str | Sequence[str] | None = None,
        verbose: int = 1,
        min_np: int | None = None,
        max_np: int | None = None,
        cooldown_range: Sequence[float] | None = None,
        num_proc: int | None = None,
    ) -> ElasticSettings:
        """Return settings: the fewest and the most ranks, and how many to begin with.

        ``min_np`` and ``max_np`` are older names. There may be too few ranks for
        ``elastic_timeout`` seconds; a rank has ``timeout_s`` to start. A node whose rank fails is
        not used any more, or not for the seconds of ``cooldown_range``. Nothing here uses ssh, nor
        ``verbose``. Raises LaunchError for numbers that contradict.
        """
        fewest = min_np if min_num_proc is None else min_num_proc
        most = max_np if max_num_proc is None else max_num_proc
        if fewest is None and num_proc is None:
            fewest = 1
        rules = checked_rules(
            num_proc, fewest, most, reset_limit, elastic_timeout, cooldown_range, named=_named
        )
        interfaces = nics.split(",") if isinstance(nics, str) else nics or ()
        return ElasticSettings(rules, timeout_s, tuple(interfaces))

    @public
    def start(self, extra_env_vars: Mapping[str, str] | None = None) -> None:
        """See that this program can start ranks on the cluster. Raises LaunchError.

        ``extra_env_vars`` are set for every rank as well.
        """
        if not ray.is_initialized():
            raise LaunchError("this program has not joined a cluster of Ray's: call ray.init()")
        inside_the_cluster()
        self._extra = dict(extra_env_vars or {})
        self._started = True

    @public
    def run(
        self,
        worker_fn: Callable[..., Any],
        callbacks: Sequence[Any] | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """Call ``worker_fn(*args, **kwargs)`` on every rank that comes.

        Returns what the last ranks returned, by rank. Raises WorkerFailed, with the text of the
        traceback, where the job cannot go on, and LaunchError where it cannot begin.
        """
        if not self._started:
            raise LaunchError("this executor has not been started: call start() first")
        if callbacks:
            raise LaunchError("callbacks: report by ray.train.report, under Ray Train")
        settings = self._settings
        driver = Driver(
            worker_command("python3"),
            settings.rules,
            RayNodes(self._takes, settings.nics),
            self._transport,
            self._env | self._extra,
            Reach(interfaces=settings.nics, start_timeout=settings.timeout_s),
        )
        call = packed_call(worker_fn, tuple(args), dict(kwargs or {}))
        printer = Printer(settings.rules.np, come=True, title="ringlet.ray")
        most = settings.rules.max_np or settings.rules.np
        request_resources(bundles=[self._takes] * most)  # of an autoscaler, if there is one
        try:
            return elastic_results(driver, printer, call, verbose=False)
        finally:
            with suppress(Exception):  # Ray has gone, which is no reason to lose the results
                request_resources(bundles=[])

    def shutdown(self) -> None:
        """Do nothing: ranks end with the call that they run."""
        self._started = False

"""Which of how many nodes this is, and where the first one is: what batch systems say of that."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ringlet.ring.errors import LaunchError
from ringlet.ring.rendezvous.environment import first_host

PORT = 29577  # that the first node listens on, where nobody has chosen one


@dataclass(frozen=True)
class Whereabouts:
    """Node ``node`` of ``nodes``, each of ``slots`` ranks; ``first`` is the host of node 0."""

    nodes: int | None = None
    node: int | None = None
    first: str | None = None
    port: int = PORT
    slots: int = 1

    def complete(self) -> Whereabouts:
        """Return this if nothing is missing. Raises LaunchError naming the option that is."""
        lacking = {"--nodes": self.nodes, "--node": self.node, "--first": self.first}
        if self.nodes == 1:
            return replace(self, node=0, first=self.first or "localhost")
        missing = [name for name, value in lacking.items() if value is None]
        if missing:
            raise LaunchError(
                f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing: the"
                " environment is not that of a Slurm step, of an indexed Job of Kubernetes with"
                " --service, or of a TrainJob, which would say it"
            )
        assert self.nodes is not None
        assert self.node is not None
        if not 0 <= self.node < self.nodes:
            raise LaunchError(f"--node {self.node} is not below --nodes {self.nodes}")
        return self


def whereabouts(env: Mapping[str, str], host: str, service: str | None = None) -> Whereabouts:
    """Return what ``env`` says, as far as it does; ``host`` is this host's full name.

    Kubeflow's TrainJob (PET_...), a step of Slurm's (SLURM_...) and an indexed Job of Kubernetes
    (JOB_COMPLETION_INDEX) are understood. The pods of the latter know each other by the name of
    their Service: ``service``, else the one in the full name. Raises LaunchError for variables that
    make no sense.
    """
    if "PET_NNODES" in env:
        return _trainjob(env)
    if "SLURM_NODEID" in env and "SLURM_STEP_NODELIST" in env:
        return _slurm(env)
    if "JOB_COMPLETION_INDEX" in env:
        return _indexed_job(env, host, service)
    return Whereabouts()


def _trainjob(env: Mapping[str, str]) -> Whereabouts:
    slots = env.get("PET_NPROC_PER_NODE", "1")
    if not slots.isdecimal():
        raise LaunchError(
            f"PET_NPROC_PER_NODE={slots!r} is no number; set the TrainJob's numProcPerNode, or"
            " give --slots"
        )
    port = _number(env, "PET_MASTER_PORT") if "PET_MASTER_PORT" in env else PORT
    first = env.get("PET_MASTER_ADDR")
    nodes, node = _number(env, "PET_NNODES"), _number(env, "PET_NODE_RANK")
    return Whereabouts(nodes, node, first, port, int(slots))


def _slurm(env: Mapping[str, str]) -> Whereabouts:
    nodes = _number(env, "SLURM_STEP_NUM_NODES")
    if _number(env, "SLURM_STEP_NUM_TASKS") != nodes:
        raise LaunchError(
            "`ringlet node` is started once a node, and starts the ranks there itself: srun"
            " --ntasks-per-node=1 ringlet node --slots N ..."
        )
    job, step = _number(env, "SLURM_JOB_ID"), _number(env, "SLURM_STEP_ID")
    first = first_host(env["SLURM_STEP_NODELIST"], "SLURM_STEP_NODELIST")
    # Below the ports that the kernel hands out by itself; steps of one job stay apart.
    port = 10000 + (job * 31 + step) % 20000
    return Whereabouts(nodes, _number(env, "SLURM_NODEID"), first, port)


def _indexed_job(env: Mapping[str, str], host: str, service: str | None) -> Whereabouts:
    node = _number(env, "JOB_COMPLETION_INDEX")
    name, _, domain = host.partition(".")
    pod = re.fullmatch(rf"(.+)-{node}", name)
    domain = service or domain
    if pod is None or not domain:
        return Whereabouts(None, node, None)
    return Whereabouts(None, node, f"{pod[1]}-0.{domain}")


def _number(env: Mapping[str, str], name: str) -> int:
    text = env.get(name, "")
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise LaunchError(f"{name}={text!r} is not a whole number")
    return int(text)

"""Variables that Horovod reads and Ringlet does not, where a program may count on them."""

from __future__ import annotations

from collections.abc import Mapping

_TRANSPORT = "RINGLET_TRANSPORT, or ringlet run --mpi or --gloo, says what ranks talk over"
# Name: what to do in its place. Flags of horovodrun that set these say the same.
INSTEAD = {
    "HOROVOD_CONTROLLER": _TRANSPORT,
    "HOROVOD_CPU_OPERATIONS": _TRANSPORT,
    "HOROVOD_HIERARCHICAL_ALLGATHER": "gathers go straight; --hierarchical-allreduce is for sums",
    "HOROVOD_TORUS_ALLREDUCE": "--hierarchical-allreduce sums over two levels too",
    "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": "a score is taken to be right to 5 %",
    "HOROVOD_MPI_THREADS_DISABLE": "an engine thread calls MPI, which has to allow that",
    "HOROVOD_THREAD_AFFINITY": "start the program by numactl or taskset, after --",
    "HOROVOD_GLOO_TIMEOUT_SECONDS": "--heartbeat-seconds says after which silence a rank is lost",
    "HOROVOD_GLOO_IFACE": "--network-interface names the interface",
    "HOROVOD_ENABLE_XLA_OPS": (
        "jit_compile=True cannot contain communication; compile what computes gradients alone"
    ),
}


def passed_over(env: Mapping[str, str], transport: str) -> list[str]:
    """Say of each of these in ``env`` that it does nothing, and what does.

    Nothing is said of one that is switched off, or that asks for the ``transport`` there is.
    """
    silent = ("", "0", transport)
    return [
        f"{name} is Horovod's, and does nothing here: {instead}"
        for name, instead in INSTEAD.items()
        if env.get(name, "").lower() not in silent
    ]

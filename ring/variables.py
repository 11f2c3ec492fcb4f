"""Environment variables: which there are, what they may say, and what was probably meant."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from ringlet.ring.log import check_level

ON, OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_SLIP, _ALIKE = 0.8, 0.75  # how much alike two names are when one is, or might be, meant
MEASURE = "measure"  # in the place of a link
TUNABLE = ("fusion_threshold", "cycle_time", "streams", "cache", "hierarchical")
ALL = "all"  # of these
_KUBERNETES = re.compile(r".*(SERVICE_(HOST|PORT)|PORT_[0-9]+_|^PORT$)")  # of a service "ringlet"

_LATENCY = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_BANDWIDTH = {
    f"{prefix}{unit}/s": factor / (8 if unit == "bit" else 1)
    for unit in ("bit", "B")
    for prefix, factor in {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}.items()
}
_NAMED = re.compile(r"\s*([0-9.e+-]+)\s*(\w+)\s*,\s*([0-9.e+-]+)\s*([\w/]+)\s*")

Check = Callable[[str, str], object]  # a variable's name and text; raises ValueError


def read_number(variable: str, text: str) -> float:
    """Read a number of at least 0. Raises ValueError, as the others here, naming ``variable``."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ValueError(f"{variable}={text!r} is not a number of at least 0")
    return value


def read_time(variable: str, text: str) -> float:
    """Read a number of seconds above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise ValueError(f"{variable}={text!r} is not a number of seconds above 0")
    return value


def read_whole(variable: str, text: str) -> int:
    """Read a whole number of at least 0; "1e6" is one."""
    if text.strip().isdecimal():
        return int(text)
    try:
        value = read_number(variable, text)
    except ValueError:
        value = 0.5
    if value != int(value):
        raise ValueError(f"{variable}={text!r} is not a whole number of at least 0")
    return int(value)


def read_flag(variable: str, text: str) -> bool:
    """Read whether something is on; an empty text says no."""
    word = text.strip().lower()
    if word not in (*ON, *OFF, ""):
        raise ValueError(f"{variable}={text!r} is not one of {', '.join(ON + OFF)}")
    return word in ON


def read_port(variable: str, text: str) -> tuple[str, int]:
    """Read ``[host:]port``; the host is empty where none is given."""
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{variable}={text!r} is not [host:]port, such as 9090 or 0.0.0.0:9090")
    return host, int(port)


def read_link(variable: str, text: str) -> tuple[float, float]:
    """Read a link's latency and bandwidth, as in ``100us,1Gbit/s``: seconds, and bytes a second.

    Units are s, ms, us and ns, and bit/s or B/s with k, M, G or T.
    """
    found = _NAMED.fullmatch(text)
    if found is not None and found[2] in _LATENCY and found[4] in _BANDWIDTH:
        try:
            latency = float(found[1]) * _LATENCY[found[2]]
            bandwidth = float(found[3]) * _BANDWIDTH[found[4]]
        except ValueError:
            latency = bandwidth = -1.0
        if 0 <= latency < math.inf and 0 < bandwidth < math.inf:
            return latency, bandwidth
    raise ValueError(
        f"{variable}={text!r} names no link: give the latency and the bandwidth between hosts, as"
        f" in {variable}=100us,1Gbit/s (s, ms, us or ns; kbit/s, Mbit/s, Gbit/s, kB/s, MB/s or"
        f" GB/s), or {variable}={MEASURE}"
    )


def read_tuned(variable: str, text: str) -> list[str]:
    """Read what autotuning is to tune: names of ``TUNABLE``, "all", or "-" before one; [] for off.

    A word for yes stands for all.
    """
    text = text.strip()
    if text.lower() in ("", *OFF):
        return []
    if text.lower() in ON:
        return [ALL]
    asked = [name.strip() for name in text.split(",")]
    for name in filter(None, asked):
        if name != ALL and name.removeprefix("-") not in TUNABLE:
            known = ", ".join([*TUNABLE, ALL])
            raise ValueError(f"{variable}={text!r}: {name!r} is not one of {known}, nor yes or no")
    return asked


def _positive(variable: str, text: str) -> None:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{variable}={text!r} is not a whole number of at least 1")


def one_of(*words: str) -> Callable[[str, str], str]:
    """Return what reads one of ``words``, which are exact."""

    def read_word(variable: str, text: str) -> str:
        if text not in words:
            raise ValueError(f"{variable}={text!r} is not one of {', '.join(words)}")
        return text

    return read_word


read_collective = one_of("auto", "allgather", "scatter_reduce")


def _unless_empty(check: Check) -> Check:
    return lambda variable, text: check(variable, text) if text else None


def _anything(variable: str, text: str) -> None:
    """What can only be judged where it is used."""


class Variable(NamedTuple):
    """What one variable may say, and what is said of it in the documents (Markdown).

    ``default`` is empty where a launcher sets it; ``meaning`` names its unit.
    """

    check: Check
    group: str
    default: str
    meaning: str


ENGINE, OBSERVE, PROCESS, RANK = "engine", "observability", "process", "rank"
_LAUNCHER = "set by `ringlet run`: "

_RINGLET: dict[str, Variable] = {
    "STREAMS": Variable(
        _positive,
        ENGINE,
        "4",
        "how many exchanges are under way at once (H: `HOROVOD_NUM_NCCL_STREAMS`)",
    ),
    "SEED": Variable(read_whole, ENGINE, "0", "the seed of the compressors' random numbers"),
    "STAGED": Variable(
        read_flag,
        ENGINE,
        "off",
        "tensors on a GPU go through host memory even over NCCL ([GPUs](gpu.md))",
    ),
    "LINK": Variable(
        lambda variable, text: text in ("", MEASURE) or read_link(variable, text),
        ENGINE,
        "unknown",
        "`latency,bandwidth` between hosts, such as `100us,1Gbit/s`, or `measure`. Collectives "
        "are then chosen by the cost model",
    ),
    "COLLECTIVE": Variable(
        read_collective,
        ENGINE,
        "auto",
        "`allgather` or `scatter_reduce`, if both are possible",
    ),
    "VERIFY_SUMS": Variable(
        read_whole,
        ENGINE,
        "by hosts",
        "ranks compare checksums of sums, one step later ([design](design.md#what-is-compared)). "
        "`1`: of everything. `16`: of a 16th of large sums, in turn. `0`: of nothing. Default: "
        "of a 32nd on one host, of everything on several hosts",
    ),
    "JOIN_DIVISOR": Variable(
        one_of("all", "contributors"),
        ENGINE,
        "all",
        "while ranks have joined, averages are divided by `all` ranks, as in Horovod, or by the "
        "`contributors`",
    ),
    "METRICS": Variable(_anything, OBSERVE, "off", "a file of JSON lines for `ringlet report`"),
    "METRICS_EVERY": Variable(
        _unless_empty(read_whole),
        OBSERVE,
        "0: never",
        "errors of each layer are measured once in so many steps",
    ),
    "PROMETHEUS": Variable(
        _unless_empty(read_port),
        OBSERVE,
        "off",
        "`[host:]port` for Prometheus to read. Each rank adds its local rank to the port",
    ),
    "TENSORBOARD": Variable(_anything, OBSERVE, "off", "a folder for TensorBoard"),
    "NUM_THREADS": Variable(
        _unless_empty(_positive),
        PROCESS,
        "a rank's share of the cores, at most `OMP_NUM_THREADS`",
        "threads of a codec's kernel. `ringlet run` sets `OMP_NUM_THREADS` to the share, "
        "torchrun sets it to 1",
    ),
    "TRANSPORT": Variable(
        _anything,
        PROCESS,
        "chosen",
        "`mpi`, `gloo`, `local` or `nccl`. `ringlet run` reads it too, if there is no "
        "`--transport`",
    ),
    "SECRET": Variable(
        _anything,
        PROCESS,
        "none",
        "the job's key, if `ringlet run` gives none: the same text for every rank, of 16 "
        "characters or more ([security](../SECURITY.md))",
    ),
    "IFACE": Variable(_anything, PROCESS, "found", "the network interface for connections"),
    "ADDRESS": Variable(_anything, PROCESS, "found", "this host's address for connections"),
    "HEARTBEAT": Variable(
        read_number,
        PROCESS,
        "5",
        "seconds without a sign of life until a rank counts as lost; 0: never",
    ),
    "KERNEL_CACHE": Variable(
        _anything, PROCESS, "`~/.cache/ringlet/kernels`", "where compiled CUDA kernels are kept"
    ),
    "RANK": Variable(_anything, RANK, "", _LAUNCHER + "this rank's number"),
    "SIZE": Variable(_anything, RANK, "", _LAUNCHER + "how many ranks there are"),
    "LOCAL_RANK": Variable(_anything, RANK, "", _LAUNCHER + "this rank's number on its host"),
    "LOCAL_SIZE": Variable(_anything, RANK, "", _LAUNCHER + "how many ranks this host has"),
    "CROSS_RANK": Variable(
        _anything, RANK, "", _LAUNCHER + "this rank's number among those of its local rank"
    ),
    "CROSS_SIZE": Variable(
        _anything, RANK, "", _LAUNCHER + "how many ranks have this one's local rank"
    ),
    "HOSTNAME": Variable(_anything, RANK, "", _LAUNCHER + "what this host is called there"),
    "NODE": Variable(
        _anything, RANK, "", _LAUNCHER + "this rank's node, if names of hosts do not tell it"
    ),
    "MEMBER": Variable(
        _anything, RANK, "", _LAUNCHER + "this process's number in an elastic job, which stays"
    ),
    "EPOCH": Variable(
        _anything, RANK, "", _LAUNCHER + "how often an elastic job's ranks were numbered anew"
    ),
    "RENDEZVOUS": Variable(_anything, RANK, "", _LAUNCHER + "where the job's store is"),
    "STORE_KEY": Variable(_anything, RANK, "", _LAUNCHER + "the store's key, which is secret"),
    "LAUNCHER": Variable(_anything, RANK, "", _LAUNCHER + "that it has started this rank"),
    "LAUNCHER_SECRET": Variable(_anything, RANK, "", ""),  # between a launcher and its wrappers
}
# Those that are read by HOROVOD_... as well.
_SHARED: dict[str, Variable] = {
    "FUSION_THRESHOLD": Variable(
        read_whole, ENGINE, "16777216", "bytes of uncompressed tensors in a fusion buffer"
    ),
    "CYCLE_TIME": Variable(
        read_number,
        ENGINE,
        "1",
        "milliseconds that single tensors wait for others to travel with, while nobody waits for "
        "their results",
    ),
    "CACHE_CAPACITY": Variable(
        read_whole,
        ENGINE,
        "4096",
        "how many names get a number of their own. If there are more, a new name takes the "
        "number of the name that was not used for longest",
    ),
    "NUM_NCCL_STREAMS": Variable(
        _positive,
        ENGINE,
        "4",
        "Horovod's name of `RINGLET_STREAMS`. If both are set, `RINGLET_STREAMS` counts",
    ),
    "HIERARCHICAL_ALLREDUCE": Variable(
        read_flag,
        ENGINE,
        "off",
        "two levels: inside hosts, then between them "
        "([collectives](which-collective.md#two-levels))",
    ),
    "AUTOTUNE": Variable(
        read_tuned,
        ENGINE,
        "off",
        "`1`, or names of what is to be tuned ([observability](observability.md#autotuning))",
    ),
    "AUTOTUNE_LOG": Variable(_anything, ENGINE, "none", "the autotuner's CSV file"),
    "AUTOTUNE_WARMUP_SAMPLES": Variable(
        read_whole, ENGINE, "3", "windows that autotuning leaves out at the start"
    ),
    "AUTOTUNE_STEPS_PER_SAMPLE": Variable(
        read_whole, ENGINE, "10", "steps of one window of autotuning"
    ),
    "AUTOTUNE_BAYES_OPT_MAX_SAMPLES": Variable(
        read_whole, ENGINE, "24", "settings after which the best one stays"
    ),
    "TIMELINE": Variable(_anything, OBSERVE, "off", "a file: a Perfetto trace of all ranks"),
    "TIMELINE_MARK_CYCLES": Variable(
        read_flag, OBSERVE, "off", "marks of the engine's cycles in it"
    ),
    "LOG_LEVEL": Variable(
        _unless_empty(lambda variable, text: check_level(text, variable)),
        OBSERVE,
        "warning",
        "trace, debug, info, warning, error, fatal",
    ),
    "STALL_CHECK_TIME_SECONDS": Variable(
        read_number,
        OBSERVE,
        "60",
        "seconds after which rank 0 names what waits, and for which ranks",
    ),
    "STALL_SHUTDOWN_TIME_SECONDS": Variable(
        read_number, OBSERVE, "0: never", "seconds after which such a wait is an error on all ranks"
    ),
    "STALL_CHECK_DISABLE": Variable(read_flag, OBSERVE, "off", "switches these warnings off"),
    "START_TIMEOUT": Variable(
        _unless_empty(read_time),
        PROCESS,
        "120; `ringlet node`: 300",
        "seconds that ranks may take to start, if there is no `--start-timeout`",
    ),
    "ELASTIC_TIMEOUT": Variable(
        _unless_empty(read_number),
        PROCESS,
        "600",
        "seconds that an elastic job may have too few ranks, if there is no `--elastic-timeout`",
    ),
}
VARIABLES = {f"RINGLET_{name}": variable for name, variable in (_RINGLET | _SHARED).items()}
UNDERSTOOD = {f"HOROVOD_{name}": variable for name, variable in _SHARED.items()}


def given(env: Mapping[str, str], name: str) -> tuple[str, str] | None:
    """Return the variable that says ``name``, ours before Horovod's, and its text; None if none."""
    for variable in (f"RINGLET_{name}", f"HOROVOD_{name}"):
        if variable in env:
            return variable, env[variable]
    return None


def check(env: Mapping[str, str]) -> None:
    """Raise ValueError naming all variables in ``env`` that are misspelt, or say what cannot be.

    Where Ringlet's and Horovod's name are both set, the first counts alone.
    """
    wrong = [said for _, said in _strangers(env) if said]
    for variable, known in (VARIABLES | UNDERSTOOD).items():
        ours = variable.replace("HOROVOD_", "RINGLET_")
        if variable in env and (variable == ours or ours not in env):
            try:
                known.check(variable, env[variable])
            except ValueError as error:
                counts = known.check in (read_whole, read_number)  # its text may have had a unit
                said = known.meaning.partition(" (")[0].partition(". ")[0]
                wrong.append(f"{error} ({said})" if counts else str(error))
    if wrong:
        raise ValueError("; ".join(wrong))


def unknown(env: Mapping[str, str]) -> list[str]:
    """Return the variables in ``env`` that begin with RINGLET_ and are none, nor a slip of one.

    What Kubernetes sets for a service of that name is left out.
    """
    return [name for name, said in _strangers(env) if not said]


def _strangers(env: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return names that are not known, each with what is to be said if another one was meant."""
    found: list[tuple[str, str]] = []
    for name in sorted(env):
        rest = name.removeprefix("RINGLET_")
        if rest == name or name in VARIABLES or _KUBERNETES.match(rest):
            continue
        near = difflib.get_close_matches(rest, [*_RINGLET, *_SHARED], 3, _ALIKE)
        slip = bool(near) and difflib.SequenceMatcher(None, near[0], rest).ratio() >= _SLIP
        meant = " or ".join(f"RINGLET_{other}" for other in near)
        said = f"there is no variable {name}; did you mean {meant}? Rename it, or unset it"
        found.append((name, said if slip else ""))
    return found

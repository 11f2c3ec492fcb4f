"""Environment variables: which there are, what they may say, and what was probably meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping

from ringlet.ring.log import check_level

ON, OFF = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
_SLIP, _ALIKE = 0.8, 0.75  # how much alike two names are when one is, or might be, meant
_KUBERNETES = re.compile(r".*(SERVICE_(HOST|PORT)|PORT_[0-9]+_|^PORT$)")  # of a service "ringlet"

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


def _positive(variable: str, text: str) -> None:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{variable}={text!r} is not a whole number of at least 1")


def _one_of(*words: str) -> Check:
    def check(variable: str, text: str) -> None:
        if text not in words:
            raise ValueError(f"{variable}={text!r} is not one of {', '.join(words)}")

    return check


def _unless_empty(check: Check) -> Check:
    return lambda variable, text: check(variable, text) if text else None


def _anything(variable: str, text: str) -> None:
    """What can only be judged where it is used."""


# What each may say. Those of the second table are read by HOROVOD_... as well.
_RINGLET: dict[str, Check] = {
    "SEED": read_whole,
    "STREAMS": _positive,
    "STAGED": read_flag,
    "LINK": _anything,
    "COLLECTIVE": _one_of("auto", "allgather", "scatter_reduce"),
    "VERIFY_SUMS": read_whole,
    "JOIN_DIVISOR": _one_of("all", "contributors"),
    "METRICS": _anything,
    "METRICS_EVERY": _unless_empty(read_whole),
    "PROMETHEUS": _unless_empty(read_port),
    "TENSORBOARD": _anything,
    "NUM_THREADS": _unless_empty(_positive),
    "TRANSPORT": _anything,
    "SECRET": _anything,
    "IFACE": _anything,
    "ADDRESS": _anything,
    "HEARTBEAT": read_number,
    "KERNEL_CACHE": _anything,
    "RANK": _anything,
    "SIZE": _anything,
    "LOCAL_RANK": _anything,
    "LOCAL_SIZE": _anything,
    "MEMBER": _anything,
    "EPOCH": _anything,
    "RENDEZVOUS": _anything,
    "STORE_KEY": _anything,
    "LAUNCHER": _anything,
    "LAUNCHER_SECRET": _anything,
}
_SHARED: dict[str, Check] = {
    "FUSION_THRESHOLD": read_whole,
    "CYCLE_TIME": read_number,
    "CACHE_CAPACITY": read_whole,
    "NUM_NCCL_STREAMS": _positive,
    "HIERARCHICAL_ALLREDUCE": read_flag,
    "AUTOTUNE": _anything,
    "AUTOTUNE_LOG": _anything,
    "AUTOTUNE_WARMUP_SAMPLES": read_whole,
    "AUTOTUNE_STEPS_PER_SAMPLE": read_whole,
    "AUTOTUNE_BAYES_OPT_MAX_SAMPLES": read_whole,
    "TIMELINE": _anything,
    "TIMELINE_MARK_CYCLES": read_flag,
    "LOG_LEVEL": _unless_empty(lambda variable, text: check_level(text, variable)),
    "STALL_CHECK_TIME_SECONDS": read_number,
    "STALL_SHUTDOWN_TIME_SECONDS": read_number,
    "STALL_CHECK_DISABLE": read_flag,
}
VARIABLES: dict[str, Check] = {f"RINGLET_{name}": c for name, c in (_RINGLET | _SHARED).items()}
UNDERSTOOD: dict[str, Check] = {f"HOROVOD_{name}": check for name, check in _SHARED.items()}


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
    for variable, judge in (VARIABLES | UNDERSTOOD).items():
        ours = variable.replace("HOROVOD_", "RINGLET_")
        if variable in env and (variable == ours or ours not in env):
            try:
                judge(variable, env[variable])
            except ValueError as error:
                wrong.append(str(error))
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

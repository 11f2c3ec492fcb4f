"""What the environment says of a job: the engine's limits, and what else ``init`` shall do."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from typing import TypeVar

from ringlet.fusion import Limits
from ringlet.fusion.limits import DIVISORS, UNKNOWN
from ringlet.job.link_settings import parse_link
from ringlet.metrics.switches import metrics_wanted
from ringlet.ring.variables import (
    ALL,
    MEASURE,
    given,
    one_of,
    read_collective,
    read_flag,
    read_number,
    read_tuned,
    read_whole,
)

T = TypeVar("T")


def limits_from(env: Mapping[str, str]) -> Limits:
    """Read the engine's limits from RINGLET_* variables, or Horovod's names for them.

    The link between hosts stays unknown where RINGLET_LINK is not set: a measurement decides how
    results are rounded, and they shall be reproducible by default. Raises ValueError naming the
    variable when a value is not a number, or negative, or no link, and ImportError when autotuning
    is not installed.
    """
    default = Limits()
    named = env.get("RINGLET_LINK", "")
    link = UNKNOWN if named in ("", MEASURE) else parse_link(named)
    autotune = _tuned(env)
    if autotune and importlib.util.find_spec("bayes_opt") is None:
        raise ImportError("autotuning needs more: pip install 'ringlet[tune]'")
    streams = _read(env, "NUM_NCCL_STREAMS", read_whole, default.streams)
    warning = _read(env, "STALL_CHECK_TIME_SECONDS", read_number, default.stall_warning)
    shutdown = _read(env, "STALL_SHUTDOWN_TIME_SECONDS", read_number, default.stall_shutdown)
    samples = default.autotune_samples
    return Limits(
        fusion_threshold=_read(env, "FUSION_THRESHOLD", read_whole, default.fusion_threshold),
        cycle_time=_read(env, "CYCLE_TIME", read_number, default.cycle_time * 1e3) / 1e3,
        seed=_read(env, "SEED", read_whole, default.seed),
        cache_capacity=_read(env, "CACHE_CAPACITY", read_whole, default.cache_capacity),
        streams=_read(env, "STREAMS", read_whole, streams),
        stall_warning=0.0 if _read(env, "STALL_CHECK_DISABLE", read_flag, False) else warning,
        stall_shutdown=shutdown,
        verify_sums=_read(env, "VERIFY_SUMS", read_whole, None),
        latency=link.latency,
        bandwidth=link.bandwidth,
        collective=read_collective(*_own(env, "COLLECTIVE", default.collective)),
        join_divisor=one_of(*DIVISORS)(*_own(env, "JOIN_DIVISOR", default.join_divisor)),
        autotune=autotune,
        autotune_log=_read(env, "AUTOTUNE_LOG", _text, default.autotune_log),
        autotune_warmup=_read(env, "AUTOTUNE_WARMUP_SAMPLES", read_whole, default.autotune_warmup),
        autotune_steps=_read(env, "AUTOTUNE_STEPS_PER_SAMPLE", read_whole, default.autotune_steps),
        autotune_samples=_read(env, "AUTOTUNE_BAYES_OPT_MAX_SAMPLES", read_whole, samples),
    )


_FIXED_BY = {  # what is set stays, unless autotuning names it
    "fusion_threshold": ("FUSION_THRESHOLD",),
    "cycle_time": ("CYCLE_TIME",),
    "streams": ("STREAMS", "NUM_NCCL_STREAMS"),
    "cache": ("CACHE_CAPACITY",),
}


def _tuned(env: Mapping[str, str]) -> str:
    """Return what is to be tuned, by the names of ``Limits``: nothing, all, or a list."""
    nothing: list[str] = []
    asked = _read(env, "AUTOTUNE", read_tuned, nothing)  # a misspelt one is an error on every rank
    if ALL in asked:
        fixed = (n for n, variables in _FIXED_BY.items() if any(given(env, v) for v in variables))
        asked += [f"-{name}" for name in fixed if name not in asked]
    return ",".join(asked)


def wishes_from(env: Mapping[str, str]) -> set[str]:
    """Read what a ``Runtime`` shall do besides.

    "measure" the link, be "hierarchical" or "staged", look at the "network" for metrics.
    """
    asked = {
        "measure": env.get("RINGLET_LINK") == MEASURE,
        "hierarchical": _read(env, "HIERARCHICAL_ALLREDUCE", read_flag, False),
        "staged": read_flag("RINGLET_STAGED", env.get("RINGLET_STAGED", "")),
        "network": metrics_wanted(env),
    }
    return {wish for wish, is_asked in asked.items() if is_asked}


def _read(env: Mapping[str, str], name: str, reader: Callable[[str, str], T], default: T) -> T:
    """Read RINGLET_``name``, or else HOROVOD_``name``, if there is one."""
    found = given(env, name)
    return default if found is None else reader(*found)


def _own(env: Mapping[str, str], name: str, default: str) -> tuple[str, str]:
    """Return RINGLET_``name``, which Horovod does not have, and what it says."""
    variable = f"RINGLET_{name}"
    return variable, env.get(variable, default)


def _text(variable: str, text: str) -> str:
    return text

"""Horovod's configuration file: the flags of horovodrun in sections, as YAML of two levels."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator
from pathlib import Path

from ringlet.ring.errors import LaunchError

# Section, key: the flag; of a switch, the flags for true and for false.
KEYS: dict[tuple[str, str], str | tuple[str, str]] = {
    ("", "verbose"): ("--verbose", ""),
    ("", "num_proc"): "--num-proc",
    ("", "np"): "--num-proc",
    ("", "hosts"): "--hosts",
    ("", "hostfile"): "--hostfile",
    ("", "start_timeout"): "--start-timeout",
    ("", "ssh_port"): "--ssh-port",
    ("", "ssh_identity_file"): "--ssh-identity-file",
    ("", "output_filename"): "--output-filename",
    ("", "network_interfaces"): "--network-interfaces",
    ("", "disable_cache"): ("--disable-cache", ""),
    ("params", "fusion_threshold_mb"): "--fusion-threshold-mb",
    ("params", "cycle_time_ms"): "--cycle-time-ms",
    ("params", "cache_capacity"): "--cache-capacity",
    ("params", "hierarchical_allreduce"): (
        "--hierarchical-allreduce", "--no-hierarchical-allreduce",
    ),
    ("params", "hierarchical_allgather"): (
        "--hierarchical-allgather", "--no-hierarchical-allgather",
    ),
    ("params", "torus_allreduce"): ("--torus-allreduce", "--no-torus-allreduce"),
    ("autotune", "enabled"): ("--autotune", "--no-autotune"),
    ("autotune", "log_file"): "--autotune-log-file",
    ("autotune", "warmup_samples"): "--autotune-warmup-samples",
    ("autotune", "steps_per_sample"): "--autotune-steps-per-sample",
    ("autotune", "bayes_opt_max_samples"): "--autotune-bayes-opt-max-samples",
    ("autotune", "gaussian_process_noise"): "--autotune-gaussian-process-noise",
    ("timeline", "filename"): "--timeline-filename",
    ("timeline", "mark_cycles"): ("--timeline-mark-cycles", "--no-timeline-mark-cycles"),
    ("stall_check", "enabled"): ("--stall-check", "--no-stall-check"),
    ("stall_check", "warning_time_seconds"): "--stall-check-warning-time-seconds",
    ("stall_check", "shutdown_time_seconds"): "--stall-check-shutdown-time-seconds",
    ("library_options", "mpi_threads_disable"): (
        "--mpi-threads-disable", "--no-mpi-threads-disable",
    ),
    ("library_options", "mpi_args"): "--mpi-args",
    ("library_options", "num_nccl_streams"): "--num-nccl-streams",
    ("library_options", "thread_affinity"): "--thread-affinity",
    ("library_options", "ccl_bgt_affinity"): "--thread-affinity",  # its name before Horovod 0.20
    ("library_options", "mlsl_bgt_affinity"): "--thread-affinity",  # and before that
    ("library_options", "gloo_timeout_seconds"): "--gloo-timeout-seconds",
    ("logging", "level"): "--log-level",
    ("logging", "hide_timestamp"): ("--log-hide-timestamp", "--no-log-hide-timestamp"),
    ("logging", "with_timestamp"): ("--log-with-timestamp", "--log-without-timestamp"),
}  # fmt: skip
# Of the file that comes with Horovod: keys that horovodrun passes over, and what stands for them.
_INSTEAD = {
    ("timeline", "enabled"): "a timeline is written where there is a filename",
    ("autotune", "cycles_per_sample"): "steps_per_sample stands for it",
    ("library_options", "mpi_threads_disabled"): "mpi_threads_disable stands for it",
}
_LINE = re.compile(r"( *)([A-Za-z_][A-Za-z0-9_-]*) *:(?: +(.*))?")
_FLOW = re.compile(r"([A-Za-z_][A-Za-z0-9_-]*) *: +\{(.*)\}")  # section: {key: value, ...}
_ITEM = re.compile(r"""(?:"[^"]*"|'[^']*'|[^,"'])+""")
_TRUE, _FALSE = ("true", "yes", "on"), ("false", "no", "off")
_NOTHING = ("", "~", "null", "Null", "NULL")


def flags_of(path: str) -> tuple[list[str], list[str]]:
    """Return what the file says as words of a command line, and of what is passed over why.

    What it gives no value (null, or nothing) is left out; what is no key of ours is passed over, as
    by horovodrun. Raises LaunchError naming the line.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"--config-file {path} cannot be read: {error}") from error
    words: list[str] = []
    passed_over: list[str] = []
    section: str | None = ""  # None: one that is passed over
    sections = {name for name, _ in KEYS}
    for number, text in _texts(lines, sections):
        where = f"--config-file {path}, line {number}"
        found = _LINE.fullmatch(text)
        if found is None:
            raise LaunchError(f"{where}: expected `key: value`, not {text.strip()!r}")
        indent, key, value = found[1], found[2].replace("-", "_"), (found[3] or "").strip()
        if not indent:
            section = ""
        if section is None:
            continue
        if not indent and key in sections:
            if value not in _NOTHING:
                raise LaunchError(f"{where}: {key} is a section of keys, not {value!r}")
            section = key
            continue
        if key == "controller":
            words += _controller(value, where)
            continue
        known = KEYS.get((section, key))
        if known is None:
            passed_over.append(f"{where}, is passed over: {_stranger(section, key)}")
            section = section if indent or value else None
        elif value not in _NOTHING:
            words += _words(known, _scalar(value), f"{where}: {key}")
    return words, passed_over


def _texts(lines: list[str], sections: set[str]) -> Iterator[tuple[int, str]]:
    """Yield what stands on each line, and its number; keys in braces as if each had a line."""
    for number, line in enumerate(lines, 1):
        text = _without_comment(line).rstrip()
        flow = _FLOW.fullmatch(text)
        if flow is not None and flow[1].replace("-", "_") in sections:
            yield number, f"{flow[1]}:"
            for item in filter(str.strip, _ITEM.findall(flow[2])):
                yield number, f"  {item.strip()}"
        elif text and text not in ("---", "..."):
            yield number, text


def _stranger(section: str, key: str) -> str:
    """Return that ``key`` is not known, and which was probably meant, here or elsewhere."""
    inside = f" in section {section}" if section else ""
    own = [name for part, name in KEYS if part == section]
    if not section:
        own += [part for part, _ in KEYS if part]
    elsewhere = [part for part, name in KEYS if name == key]
    if (section, key) in _INSTEAD:
        meant = _INSTEAD[section, key]
    elif near := difflib.get_close_matches(key, own, 1):
        meant = f"did you mean {near[0]!r}?"
    elif elsewhere:
        meant = f"it belongs to {f'section {elsewhere[0]}' if elsewhere[0] else 'no section'}"
    else:
        meant = f"there are {', '.join(dict.fromkeys(own))}"
    return f"{key!r} is not known{inside}; {meant}"


def _words(known: str | tuple[str, str], value: str, where: str) -> list[str]:
    if isinstance(known, str):
        return [f"{known}={value}"] if known.startswith("--") else [known, value]
    word = value.lower()
    if word not in (*_TRUE, *_FALSE):
        raise LaunchError(f"{where} is true or false, not {value!r}")
    flag = known[0] if word in _TRUE else known[1]
    return [flag] if flag else []


def _controller(value: str, where: str) -> list[str]:
    word = _scalar(value)
    if word in ("gloo", "mpi"):
        return [f"--{word}"]
    if word in _NOTHING:
        return []
    raise LaunchError(f"{where}: controller is gloo or mpi, not {word!r}")


def _scalar(text: str) -> str:
    if text.startswith("'") and text.endswith("'") and len(text) > 1:
        return text[1:-1].replace("''", "'")
    if text.startswith('"') and text.endswith('"') and len(text) > 1:
        try:
            return str(json.loads(text))
        except ValueError:
            return text[1:-1]
    return text


def _without_comment(line: str) -> str:
    quoted = ""
    for i, letter in enumerate(line):
        if quoted:
            quoted = "" if letter == quoted else quoted
        elif letter in "'\"":
            quoted = letter
        elif letter == "#" and (i == 0 or line[i - 1] in " \t"):
            return line[:i]
    return line

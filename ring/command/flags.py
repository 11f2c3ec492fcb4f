"""The flags of horovodrun that tune a job, and the variables that carry them to the ranks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from ringlet.ring.command.configuration_file import flags_of
from ringlet.ring.errors import LaunchError
from ringlet.ring.log import LEVELS, check_level
from ringlet.ring.rendezvous.unread_variables import INSTEAD
from ringlet.ring.variables import read_whole


def _megabytes(text: str) -> str:
    return str(round(float(_number(str(float(text) * (1 << 20))))))


def _number(text: str) -> str:
    if not 0 <= float(text) < float("inf"):
        raise ValueError
    return text


def _whole(text: str) -> str:
    return str(read_whole("", text))


def _level(text: str) -> str:
    check_level(text, "--log-level")
    return text


# Flag: variable, what its value is converted by, what it is.
_VALUES: dict[str, tuple[str, Callable[[str], str], str]] = {
    "--fusion-threshold-mb": ("FUSION_THRESHOLD", _megabytes, "size of a fusion buffer, MiB"),
    "--cycle-time-ms": ("CYCLE_TIME", _number, "how long tensors wait for company, ms"),
    "--cache-capacity": ("CACHE_CAPACITY", _whole, "responses that are remembered"),
    "--num-nccl-streams": ("STREAMS", _whole, "exchanges under way at once"),
    "--timeline-filename": ("TIMELINE", str, "write a trace of what is communicated"),
    "--autotune-log-file": ("AUTOTUNE_LOG", str, "write what autotuning tries, CSV"),
    "--autotune-warmup-samples": ("AUTOTUNE_WARMUP_SAMPLES", _whole, "samples to throw away"),
    "--autotune-steps-per-sample": ("AUTOTUNE_STEPS_PER_SAMPLE", _whole, "steps of a sample"),
    "--autotune-bayes-opt-max-samples": (
        "AUTOTUNE_BAYES_OPT_MAX_SAMPLES",
        _whole,
        "samples until the best is kept",
    ),
    "--stall-check-warning-time-seconds": (
        "STALL_CHECK_TIME_SECONDS",
        _number,
        "warn of a rank that others wait for this long",
    ),
    "--stall-check-shutdown-time-seconds": (
        "STALL_SHUTDOWN_TIME_SECONDS",
        _number,
        "end a job that waits this long (0: never)",
    ),
    "--log-level": ("LOG_LEVEL", _level, "what is logged: " + ", ".join(LEVELS)),
    "--heartbeat-seconds": ("HEARTBEAT", _number, "silence after which a rank is lost (0: never)"),
}
# Flag, which has a counterpart with "no-": variable, what its 1 means.
_PAIRS = {
    "autotune": ("AUTOTUNE", "tune the engine while training"),
    "timeline-mark-cycles": ("TIMELINE_MARK_CYCLES", "mark cycles in the trace"),
    "hierarchical-allreduce": ("HIERARCHICAL_ALLREDUCE", "reduce inside hosts first"),
    "stall-check": ("STALL_CHECK_DISABLE", "do not warn of stalls"),
}
_SWITCHES = {
    f"--{no}{flag}": (name, value, meaning if value == "1" else "")
    for flag, (name, meaning) in _PAIRS.items()
    for no, value in zip(("", "no-"), "01" if name.endswith("_DISABLE") else "10", strict=True)
}

_LOGGING = "configure Python's logging in the program; its format then counts"
_TIMESTAMP = "pipe the output through `ts`"
_BINDING = INSTEAD["HOROVOD_THREAD_AFFINITY"]
# What horovodrun has besides and a job cannot do without, and what to do instead.
ABSENT = {
    "--mpi-args": "set MPI's own variables, as in --env MPIR_CVAR_DEBUG_SUMMARY=1",
    "--jsrun": "use the system's own launcher; ranks find each other under any mpiexec",
    "--tcp": "set what the libraries read: --env NCCL_IB_DISABLE=1, --env FI_PROVIDER=tcp",
    "--binding-args": _BINDING,
}
# What it has besides and no result depends on, and what to do instead: said, and passed over.
PASSED_OVER = {
    "--hierarchical-allgather": INSTEAD["HOROVOD_HIERARCHICAL_ALLGATHER"],
    "--torus-allreduce": INSTEAD["HOROVOD_TORUS_ALLREDUCE"],
    "--autotune-gaussian-process-noise": INSTEAD["HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE"],
    "--mpi-threads-disable": INSTEAD["HOROVOD_MPI_THREADS_DISABLE"],
    "--thread-affinity": _BINDING,
    "--gloo-timeout-seconds": INSTEAD["HOROVOD_GLOO_TIMEOUT_SECONDS"],
    "--log-with-timestamp": _LOGGING,
    "--no-log-hide-timestamp": _LOGGING,
    "--prefix-output-with-timestamp": _TIMESTAMP,
    "-prefix-timestamp": _TIMESTAMP,
}
_WITH_VALUE = (
    "--mpi-args", "--autotune-gaussian-process-noise", "--binding-args", "--thread-affinity",
    "--gloo-timeout-seconds",
)  # fmt: skip
# What it has, and what is so anyway.
NEEDLESS = {
    "--disable-cache": "nothing is remembered of hosts",
    "--no-hierarchical-allgather": "gathers go straight",
    "--no-torus-allreduce": "there is none",
    "--no-mpi-threads-disable": "MPI is asked for threads",
    "--log-without-timestamp": "lines have no time in front",
    "--log-hide-timestamp": "lines have no time in front",
}


class _Set(argparse.Action):
    """Collects variables; the last word on each counts."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        options: argparse.Namespace,
        value: object,
        flag: str | None = None,
    ) -> None:
        assert flag is not None
        if flag in _SWITCHES:
            name, text, _ = _SWITCHES[flag]
        else:
            name, convert, meaning = _VALUES[flag]
            try:
                text = convert(str(value))
            except ValueError as error:
                if convert is _level:
                    parser.error(str(error))
                parser.error(f"{flag} ({meaning}) takes a number of at least 0, not {value!r}")
        options.tunables = {**options.tunables, f"RINGLET_{name}": text}


def add_tunables(parser: argparse.ArgumentParser) -> None:
    """Define the flags; what they set is ``options.tunables``, by variable."""
    group = parser.add_argument_group(
        "tuning", "Each sets the variable RINGLET_... that is named for every rank."
    )
    parser.set_defaults(tunables={})
    for flag, (name, _, meaning) in _VALUES.items():
        text = f"{meaning} ({name})"
        group.add_argument(flag, action=_Set, metavar="X", dest="tunables", help=text)
    for flag, (name, value, meaning) in _SWITCHES.items():
        text = f"{meaning} ({name}={value})" if meaning else argparse.SUPPRESS
        group.add_argument(flag, action=_Set, nargs=0, dest="tunables", help=text)
    for flags, action in ((ABSENT, _Refuse), (PASSED_OVER, _PassOver)):
        for flag in flags:
            values = 1 if flag in _WITH_VALUE else 0
            parser.add_argument(flag, action=action, nargs=values, help=argparse.SUPPRESS)
    for flag in NEEDLESS:
        parser.add_argument(flag, dest="needless", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--config-file",
        action=_Configure,
        metavar="FILE",
        help="flags in a file, as horovodrun takes it (YAML); those of the command line win",
    )


def meaning_of(parser: argparse.ArgumentParser, flag: str) -> str:
    """Say what ``flag``, of horovodrun, is here."""
    if flag in ABSENT:
        return f"refused: {ABSENT[flag]}"
    if flag in PASSED_OVER:
        return f"passed over, with a line that says so: {PASSED_OVER[flag]}"
    if flag in NEEDLESS:
        return f"accepted: {NEEDLESS[flag]}"
    if not any(flag in action.option_strings for action in parser._actions):
        return ""
    name = _VALUES[flag][0] if flag in _VALUES else _SWITCHES[flag][0] if flag in _SWITCHES else ""
    return f"the same (`RINGLET_{name}`)" if name else "the same"


class _Configure(argparse.Action):
    """Reads flags from a file, for what the command line leaves open: as horovodrun does it."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        options: argparse.Namespace,
        value: object,
        flag: str | None = None,
    ) -> None:
        words, passed_over = flags_of(str(value))
        for told in passed_over:
            print(f"{parser.prog}: {told}", file=sys.stderr)
        found = parser.parse_args(words)
        options.tunables = {**found.tunables, **options.tunables}
        for name, said in vars(found).items():
            if getattr(options, name, None) == parser.get_default(name):
                setattr(options, name, said)


class _Refuse(argparse.Action):
    """Says what to do instead of a flag that horovodrun has."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        options: argparse.Namespace,
        value: object,
        flag: str | None = None,
    ) -> None:
        assert flag is not None
        raise LaunchError(f"{flag} is horovodrun's: {ABSENT[flag]}")


class _PassOver(argparse.Action):
    """Says that a flag that horovodrun has does nothing, and what does."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        options: argparse.Namespace,
        value: object,
        flag: str | None = None,
    ) -> None:
        assert flag is not None
        said = f"{flag} is horovodrun's, and does nothing here: {PASSED_OVER[flag]}"
        print(f"{parser.prog}: {said}", file=sys.stderr)

"""Injects every kind of fault there is a promise about, and writes down what came of it.

    make faults                                     # all, and writes docs/reliability.md
    python tests/faults.py --minutes 2 --rows 1 7   # some rows, printed only
    python tests/faults.py --minutes 0 --rows 1 7 --write   # replaces these rows alone

A row names the tests that hold its promise; they run in `make test` too. What they measure they
record as a property, and the table shows it. Row 17 is benchmarks/chaos.py. The exit status is 1 if
a test failed.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- written by make faults -->\n", "<!-- end of what make faults writes -->\n"


@dataclass(frozen=True)
class Row:
    """One kind of fault: what is promised, and the tests that inject it, as pytest names them."""

    number: int
    fault: str
    promise: str
    tests: tuple[str, ...]


ROWS = (
    Row(
        1,
        "`kill -9` while a rank negotiates, encodes, sends, sums, decodes, or is idle",
        "Survivors raise `PeerLost` with the rank's number. An elastic job goes on; replicas are "
        "equal.",
        (
            "fusion/test_killed.py",
            "frameworks/test_elastic.py::test_training_goes_on_when_a_host_loses_its_rank_0",
            "frameworks/test_elastic.py::"
            "test_survivors_of_the_only_host_go_on_with_what_compression_held_back",
        ),
    ),
    Row(
        2,
        "`SIGSTOP`: a rank, or its whole process group, freezes",
        "It is named within the heartbeat and 2 s, once `init` has returned. Elastic: it is ended, "
        "and its epoch shuts it out.",
        (
            "ring/test_control_pulse.py",
            "frameworks/test_elastic.py::test_a_frozen_rank_is_ended_and_the_others_go_on",
            "frameworks/test_elastic.py::test_who_freezes_while_ranks_are_numbered_anew_is_ended",
            "frameworks/test_elastic.py::test_who_freezes_before_it_meets_the_others_is_ended",
            "frameworks/test_elastic.py::"
            "test_who_is_lost_between_meeting_the_others_and_the_control_plane",
        ),
    ),
    Row(
        3,
        "a host vanishes and says nothing",
        "The other ranks name it within the heartbeat and 2 s, and the job ends. An elastic job "
        "goes on within the same time (heartbeats of 1 s or more). This holds for rank 0's host "
        "too, and for two hosts at once.",
        (
            "ring/test_launch_networks.py::test_a_host_that_vanishes_without_a_word",
            "frameworks/test_elastic.py::test_hosts_that_are_cut_off_are_given_up",
        ),
    ),
    Row(
        4,
        "links lose 1 % or 5 % of all packets",
        "Results are those of links that lose none, bit for bit. No rank is taken for dead.",
        ("fusion/test_packet_loss.py",),
    ),
    Row(
        5,
        "one rank is slower than the others",
        "No rank is taken for dead. The log names the straggler.",
        (
            "fusion/test_stall.py",
            "ring/test_control_pulse.py::test_a_rank_that_holds_the_interpreters_lock_is_not_lost",
        ),
    ),
    Row(
        6,
        "a connection is reset, a message ends in the middle, the other end is gone",
        "All ranks raise one error that names the ranks at both ends; nothing half-written shows.",
        ("fusion/test_severed.py", "ring/test_control.py", "ring/test_wire.py"),
    ),
    Row(
        7,
        "bits flip on the way",
        "The comparison of sums names the step; a changed frame is refused before memory is taken.",
        ("fusion/test_verify_sums.py", "compressors/test_wire.py", "ring/test_checksum.py"),
    ),
    Row(
        8,
        "names, order, shapes, dtypes, specs or settings differ between ranks",
        "The same `Mismatch` on every rank; the engine goes on.",
        ("fusion/test_mixed_faults.py", "fusion/test_negotiation.py"),
    ),
    Row(
        9,
        "a compressor raises, writes nothing, has the wrong size, exits, or takes long",
        "Every rank raises an error that names rank and compressor.",
        ("fusion/test_plugin_faults.py", "fusion/test_failed_kinds.py"),
    ),
    Row(
        10,
        "Inf or NaN in one rank's gradients, with every compressor and a loss scale of `precision`",
        "All ranks skip that step, and residuals stay as they were.",
        ("frameworks/test_precision.py",),
    ),
    Row(
        11,
        "a restart; ranks leave and join",
        "A restart from sharded checkpoints goes on bit for bit. Survivors keep residuals to "
        "1e-6. If a neighbour has a copy, residuals of lost ranks are kept too.",
        (
            "frameworks/test_torch_state.py",
            "frameworks/test_elastic.py::"
            "test_survivors_of_the_only_host_go_on_with_what_compression_held_back",
            "frameworks/test_elastic.py::test_hosts_come_and_go_without_going_back",
            "frameworks/test_elastic.py::test_a_script_may_replace_all_hosts_at_once",
            "frameworks/test_elastic_redundancy.py",
            "frameworks/test_elastic_memory.py",
            "frameworks/test_elastic.py::test_a_script_names_hosts_elsewhere",
        ),
    ),
    Row(
        12,
        "ranks have different numbers of batches",
        "Nobody waits for ever. If you choose so, the mean is over the ranks that gave something.",
        ("fusion/test_uneven.py", "fusion/test_join_divisor.py"),
    ),
    Row(
        13,
        "no memory for a fusion buffer",
        "All ranks give the step up and go on with smaller buckets, or raise one `MemoryError`.",
        ("fusion/test_memory.py",),
    ),
    Row(
        14,
        "a disk is full",
        "Training goes on. What is printed or traced is dropped, and one message says so. A file "
        "is replaced whole or not at all.",
        (
            "ring/test_launch_output.py",
            "ring/test_safe_files.py",
            "fusion/test_timeline.py::test_the_queue_is_bounded_and_a_full_disk_costs_events_only",
        ),
    ),
    Row(
        15,
        "a rank forks; SIGINT, SIGTERM; the launcher or a wrapper is killed",
        "A forked child ends. Signals reach every rank. No process is left. If the launcher was "
        "killed, a message says so where the launcher printed.",
        (
            "frameworks/test_torch_fork.py",
            "ring/test_launch.py::test_signals_are_passed_on",
            "ring/test_launch.py::test_the_second_interrupt_kills",
            "ring/test_launch.py::test_killing_a_wrapper_ends_the_job",
            "ring/test_launch.py::test_killing_the_launcher_leaves_nothing",
            "ring/test_elastic_discovery.py::test_a_script_ends_with_its_launcher",
            "frameworks/test_elastic.py::test_a_killed_launcher_ends_all_ranks_and_that_is_said",
            "ring/test_launch.py::test_killing_a_rank_ends_the_job",
            "ring/test_launch.py::test_what_a_rank_leaves_behind_is_ended",
        ),
    ),
    Row(
        16,
        "strangers: wrong keys, replays, lengths of 4 GiB, silence, pickles, a seized place",
        "No code of theirs runs, no memory of ranks is taken for them once these have met, and the "
        "job goes on or says why not.",
        (
            "ring/test_admission.py",
            "ring/test_gloo_proof.py",
            "ring/test_launch_listener.py",
            "ring/test_launch_pmi.py",
            "ring/test_kv_store.py",
            "ring/test_node.py::test_a_node_that_says_nonsense_of_itself_is_sent_away",
            "frameworks/test_elastic_redundancy.py::test_a_head_that_makes_no_sense_is_refused",
            "frameworks/test_hostile_files.py",
        ),
    ),
)


def play(rows: list[Row]) -> dict[str, tuple[int, int, int, list[str]]]:
    """Run the tests of ``rows``; return passed, failed, skipped and what was measured, by test."""
    tests = sorted({test for row in rows for test in row.tests})
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile"]
        command += ["--max-worker-restart", "0"]  # with another process pytest-xdist hangs
        command += [f"--junitxml={report}", *(str(ROOT / "tests" / test) for test in tests)]
        subprocess.run(command, check=False, cwd=ROOT)
        cases = list(ElementTree.parse(report).iter("testcase"))
    return {test: _outcome([case for case in cases if _belongs(case, test)]) for test in tests}


def _belongs(case: ElementTree.Element, test: str) -> bool:
    file, _, function = test.partition("::")
    module = "tests." + file.removesuffix(".py").replace("/", ".")
    name = str(case.get("name")).partition("[")[0]
    return case.get("classname") == module and function in ("", name)


def _outcome(cases: list[ElementTree.Element]) -> tuple[int, int, int, list[str]]:
    bad = sum(c.find("failure") is not None or c.find("error") is not None for c in cases)
    out = sum(c.find("skipped") is not None for c in cases)
    said = [str(p.get("value")) for c in cases for p in c.iter("property")]
    return len(cases) - bad - out, bad, out, said


def table(
    rows: list[Row], found: dict[str, tuple[int, int, int, list[str]]], before: dict[int, str]
) -> list[str]:
    """Return the table as lines of Markdown; rows that were not played are those of ``before``."""
    lines = ["| # | fault | promise | measured | tests |", "|---|---|---|---|---|"]
    for row in ROWS:
        if row not in rows:
            lines += [before[row.number]] if row.number in before else []
            continue
        outcomes = [found[test] for test in row.tests]
        passed, failed, out = (sum(o[i] for o in outcomes) for i in range(3))
        said = "; ".join(dict.fromkeys(text for o in outcomes for text in o[3]))
        verdict = f"{passed} passed" if not failed else f"**{failed} of {passed + failed} failed**"
        verdict += f", {out} not run" if out else ""
        lines.append(f"| {row.number} | {row.fault} | {row.promise} | {said} | {verdict} |")
    return lines


def rows_of(written: str) -> dict[int, str]:
    """Return the lines of a table that was written before, by the numbers of their rows."""
    found = re.findall(r"^(\| (\d+) \|.*)$", written, re.MULTILINE)
    return {int(number): line for line, number in found}


def chaos(minutes: float, seed: int) -> tuple[str, int]:
    """Run the benchmark; return what it printed of its result, and its exit status."""
    command = [sys.executable, str(ROOT / "benchmarks" / "chaos.py")]
    command += ["--minutes", str(minutes), "--seed", str(seed)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    return re.sub("^# Chaos: ", "Row 17, chaos: ", done.stdout[done.stdout.find("# Chaos") :]), (
        done.returncode
    )


def main() -> int:
    """Run what is asked for; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="of chaos; 0: none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, nargs="*", help="numbers of rows (default: all)")
    parser.add_argument("--write", action="store_true", help="into docs/reliability.md")
    options = parser.parse_args()
    rows = [row for row in ROWS if not options.rows or row.number in options.rows]
    above, rest = PAGE.read_text().split(BEGIN)
    written, below = rest.split(END)
    found = play(rows)
    kept = {} if rows == list(ROWS) or not options.write else rows_of(written)
    lines = table(rows, found, kept)
    failed = any(outcome[1] for outcome in found.values())
    if options.minutes:
        said, code = chaos(options.minutes, options.seed)
        lines += ["", *said.splitlines()]
        failed |= code != 0
    elif kept:
        lines += ["", *written[written.find("Row 17") :].rstrip().splitlines()]
    when = f"On {os.cpu_count()} cores, {date.today()}."
    if kept:
        first = next((line for line in written.splitlines() if line.startswith("On ")), when)
        numbers = ", ".join(str(row.number) for row in rows)
        when = f"{first.partition(' Rows ')[0]} Rows {numbers}: {date.today()}."
    text = "\n".join(["", when, "", *lines, "", ""])
    print(text)
    if options.write:
        PAGE.write_text(above + BEGIN + text + END + below)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

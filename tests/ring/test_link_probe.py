"""Measured links, and what the doctor says about a machine."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
from collections import deque
from pathlib import Path

import pytest

from ringlet.ring.communicator import Communicator
from ringlet.ring.cost import link_probe
from ringlet.ring.cost.link_probe import MeasuredLink, measure_links
from ringlet.ring.launch import machine, start
from ringlet.ring.launch.machine import examine, versions
from ringlet.ring.transports.local import run_local
from ringlet.ring.wire.handshake import CLAIM, GREETING


@pytest.fixture(autouse=True)
def loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGLET_ADDRESS", "127.0.0.1")
    monkeypatch.delenv("RINGLET_IFACE", raising=False)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_every_rank_has_the_same_figures(count: int) -> None:
    def run(comm: Communicator) -> list[MeasuredLink]:
        hosts = [f"h{r % count}" for r in range(comm.size)]
        return measure_links(comm, hosts, seconds=0.02)

    told = run_local(run, count + 2)
    assert all(found == told[0] for found in told)
    names = [f"h{i}" for i in range(count)]
    pairs = [(a, b) for a in names for b in names if a != b] if count <= 4 else None
    ring = [(a, names[(i + 1) % count]) for i, a in enumerate(names)]
    assert [(link.source, link.target) for link in told[0]] == (
        pairs if pairs is not None else ring
    )
    assert all(link.latency > 0 and link.rate > 1e6 and not link.error for link in told[0])


def test_a_link_that_carries_little_is_measured_by_what_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link_probe, "CHUNK", 1 << 22)  # of which the first four are not counted
    (told, _) = run_local(lambda comm: measure_links(comm, ["a", "b"], seconds=1e-3), 2)
    assert all(link.rate > 1e6 and not link.error for link in told)


def test_a_link_that_cannot_be_measured_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_probe, "PATIENCE", 0.2)
    monkeypatch.setattr(link_probe, "own_address", lambda: "192.0.2.1")  # of no host
    told = run_local(lambda comm: measure_links(comm, ["a", "b"], 0.02), 2)
    assert told[0] == told[1]
    assert all("Cannot assign requested address" in link.error for link in told[0])


def test_strangers_are_not_answered() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        where = "{}:{}".format(*listener.getsockname())
        with socket.create_connection(listener.getsockname()) as stranger:
            stranger.sendall(bytes(CLAIM))
            answering = threading.Thread(target=link_probe._answer, args=(listener, b"k" * 32))
            answering.start()
            stranger.recv(GREETING, socket.MSG_WAITALL)
            assert stranger.recv(1) == b""
            link = link_probe._drive("a", "b", where, b"k" * 32, 0.02)
            answering.join(60)
    assert link.rate > 0


def test_strangers_that_come_without_end_do_not_hold_a_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(link_probe, "PATIENCE", 0.5)
    monkeypatch.setattr(link_probe, "STRANGER", 0.05)
    ended = threading.Event()

    def crowd(where: tuple[str, int]) -> None:
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):  # nobody listens
            silent = deque[socket.socket]()
            while not ended.is_set():
                silent.append(stack.enter_context(socket.create_connection(where)))
                if len(silent) > 4:
                    silent.popleft().recv(GREETING + 1, socket.MSG_WAITALL)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        strangers = threading.Thread(target=crowd, args=(listener.getsockname(),))
        strangers.start()
        failed: list[BaseException] = []

        def answer() -> None:
            try:
                link_probe._answer(listener, b"k" * 32)
            except TimeoutError as error:
                failed.append(error)

        answering = threading.Thread(target=answer, daemon=True)
        answering.start()
        answering.join(30)
        ended.set()
        listener.close()
        strangers.join(60)
    assert failed


def test_what_is_missing_is_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert versions()["numpy"]
    found = {finding.name: finding for finding in examine({})}
    assert all(finding.good for finding in found.values())
    assert {name for name in machine.SELDOM if name in found} == {
        name for name in machine.SELDOM if versions()[name]
    }
    assert found["launcher"].text == "none: rank 0 of 1 over local"
    monkeypatch.setattr(start, "lacking", lambda: {"mpi": "no mpi4py", "gloo": "no torch"})
    monkeypatch.setattr(machine, "versions", lambda: {"numpy": ""})
    bad = {finding.name for finding in examine({"RANK": "1"}) if not finding.good}
    assert bad == {"numpy", "transports", "launcher"}


@pytest.mark.mpi
@pytest.mark.skipif(start.lacking()["mpi"] is not None, reason="needs mpi4py and mpiexec")
def test_an_mpi_library_that_does_not_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(machine, "_MPI", "raise SystemExit('no such library')")
    found = {finding.name: finding for finding in examine({})}["mpi library"]
    assert (found.good, found.text) == (False, "does not start; it said: no such library")

    def hangs(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("python", 60)

    monkeypatch.setattr(subprocess, "run", hangs)
    assert not {finding.name: finding for finding in examine({})}["mpi library"].good

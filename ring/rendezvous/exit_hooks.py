"""How a rank that an exception ends leaves the job: at once, and with a word to its launcher."""

from __future__ import annotations

import atexit
import opcode
import os
import sys
import threading
import weakref
from collections.abc import Mapping
from functools import cache
from types import FrameType, TracebackType
from typing import Any, NoReturn

from ringlet.ring.descriptors import flush_standard_streams
from ringlet.ring.errors import LOST_PEER, LaunchError, PeerLost
from ringlet.ring.process_owner import is_lent
from ringlet.ring.rendezvous.epochs import leaving_name
from ringlet.ring.rendezvous.loss_report import LossReport, loss_report_name
from ringlet.ring.wire.keys import MEMBER, STORE_KEY
from ringlet.ring.wire.kv_client import SCHEME, Client
from ringlet.ring.wire.kv_store import Op

PATIENCE = 2.0  # seconds that a rank on its way out spends on its report
# In what torch raises when a connection ends: where gloo noticed, and NCCL's name for it.
_SIGNS_OF_LOSS = ("gloo/transport/", "ncclRemoteError")


def leave_on_exception(always: bool) -> None:
    """Let a rank that an exception ends really end, with a code that tells cause from effect.

    At exit mpi4py calls MPI_Finalize, which waits for ranks that wait for this one in a collective:
    the job would hang, and its launcher never learn of the failure; so leave ``always`` before it.
    A rank that only failed because it lost another one leaves with code LOST_PEER, and tells the
    launcher, if it can, which one that was. A forked child that ends well leaves in the same way:
    it must not finalize its parent's MPI. A process that an engine has lent stays as it is.
    """
    if not is_lent():
        _hook(always)


class _Witness:
    """Goes with the exception that has it."""


@cache
def _hook(always: bool) -> None:
    rank = os.getpid()
    program = _outermost_frame()
    show = sys.excepthook
    failed: list[BaseException] = []
    asked: list[int] = []  # the code that sys.exit was last called with, unless it was 0, or caught
    witnesses: list[weakref.ref[_Witness]] = []  # of what it was called for last

    def code() -> int:
        """Return what the first of what failed, or else sys.exit, ends this process with."""
        if not failed:
            return (*asked, 0)[0]
        codes = {KeyboardInterrupt: 130, PeerLost: LOST_PEER, SystemExit: (*asked, 1)[0]}
        return next((c for kind, c in codes.items() if isinstance(failed[0], kind)), 1)

    def note(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        loss = _loss(error)
        failed.append(loss or error)
        show(kind, error, trace)
        if loss is not None:
            report_loss(loss, os.environ)
        if os.getpid() == rank:
            tell_leaving(code(), os.environ)

    def leave() -> None:
        if program is not None and _returned(program):
            asked.clear()  # it was caught, and is kept: what pytest.raises gives, say
        if always and asked and not failed:
            failed.append(SystemExit(asked[-1]))
        child = always and os.getpid() != rank
        if not failed and not always and os.getpid() == rank:
            raised = program is not None and not _returned(program)
            tell_leaving(None if raised and not asked else code(), os.environ)
        if child or (failed and (always or isinstance(failed[0], PeerLost))):
            flush_standard_streams()
            os._exit(code() if failed else 0)

    def exit_with(status: Any = None, /) -> NoReturn:
        # No hook sees the code of a SystemExit, and at exit it is too late to ask for it.
        if threading.current_thread() is not threading.main_thread():
            leave_now(status)  # ends that thread, and nothing else
        witnesses.clear()
        asked[:] = [status] if isinstance(status, int) and status else [1] if status else []
        try:
            leave_now(status)
        except SystemExit as error:
            if asked:
                # One for both hooks: a second would let the first go.
                witness = vars(error).setdefault("_ringlet", _Witness())
                witnesses[:] = [weakref.ref(witness, gone)]
                del witness
            raise

    def gone(_: object) -> None:
        """Forget what was asked for where the program has caught it, and goes on."""
        if sys._getframe().f_back is not None:  # a SystemExit that nobody catches outlives all code
            asked.clear()

    leave_now, sys.exit = sys.exit, exit_with
    sys.excepthook = note
    atexit.register(leave)  # runs after the handlers that are registered later


def _outermost_frame() -> FrameType | None:
    """Return the frame of the program; None where the main thread does not call this."""
    if threading.current_thread() is not threading.main_thread():
        return None
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
    return frame


def _returned(frame: FrameType) -> bool:
    """Whether a ``frame`` that has ended was not left by an exception."""
    last = opcode.opname[frame.f_code.co_code[frame.f_lasti]] if frame.f_lasti >= 0 else ""
    return last.startswith(("RETURN_VALUE", "RETURN_CONST"))


def _loss(error: BaseException) -> PeerLost | None:
    """Return ``error`` if it says that a rank is lost, as torch's own collectives say it too."""
    if isinstance(error, PeerLost):
        return error
    text = str(error)
    if isinstance(error, RuntimeError) and any(sign in text for sign in _SIGNS_OF_LOSS):
        return PeerLost(text.strip().split("\n")[0])
    return None


def report_loss(error: PeerLost, env: Mapping[str, str]) -> bool:
    """Tell the launcher that ``env`` names, if any, whom this rank has lost.

    Returns whether it was told: nobody is left to hear of it when the launcher is gone as well.
    """
    name = loss_report_name(int(env.get("RINGLET_RANK", -1)))
    return _tell(name, LossReport(error.ranks, str(error)).pack(), env)


def tell_leaving(code: int | None, env: Mapping[str, str]) -> None:
    """Tell the launcher that this rank ends with ``code``, None if unknown: the others lose it.

    An interpreter with torch in it takes a second to end, and longer where others keep the cores.
    In an elastic job only who fails says so.
    """
    if MEMBER not in env or (code or 0) & 255:
        number = int(env.get(MEMBER, env.get("RINGLET_RANK", -1)))
        _tell(leaving_name(number), b"?" if code is None else b"%d" % (code & 255), env)


def _tell(name: str, value: bytes, env: Mapping[str, str]) -> bool:
    place = env.get("RINGLET_RENDEZVOUS", "")
    if not place.startswith(SCHEME) or STORE_KEY not in env:
        return False
    rank, key = int(env["RINGLET_RANK"]), bytes.fromhex(env[STORE_KEY])
    try:
        # A connection of its own: another thread may be waiting for an answer on the usual one.
        client = Client(place.removeprefix(SCHEME), key, rank, PATIENCE)
        try:
            client.ask(Op.SET, name.encode(), value, timeout=PATIENCE)
        finally:
            client.close()
    except (LaunchError, TimeoutError):
        return False
    return True

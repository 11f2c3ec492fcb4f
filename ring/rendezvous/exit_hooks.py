"""How a rank that an exception ends leaves the job: at once, and with a word to its launcher."""

from __future__ import annotations

import atexit
import builtins
import opcode
import os
import sys
import threading
import weakref
from functools import cache
from types import FrameType, TracebackType
from typing import Any, NoReturn

from ringlet.ring.descriptors import flush_standard_streams
from ringlet.ring.errors import LOST_PEER, PeerLost
from ringlet.ring.process_owner import is_lent
from ringlet.ring.rendezvous.loss_report import report_loss, tell_leaving

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


# A rank of MPI that joins a group of torch's too has both: each passes on to the one before it.
@cache
def _hook(always: bool) -> None:
    global _latest
    leaving = _latest = _Leaving(always)
    sys.exit, sys.excepthook = leaving.exit_with, leaving.note
    for name in ("exit", "quit"):
        if type(getattr(builtins, name, None)).__name__ == "Quitter":  # the interpreter's
            setattr(builtins, name, _exit)
    atexit.register(leaving.leave)  # runs after the handlers that are registered later


def ended_by() -> BaseException | None:
    """Return the exception that ends this process, if one does; of SystemExit the code alone.

    At a prompt none does: it is shown there, and the session goes on.
    """
    if _latest is None or hasattr(sys, "ps1") or sys.flags.interactive:
        return None
    return _latest.failed or (SystemExit(_latest.asked) if _latest.exits() else None)


def tell_exit() -> None:
    """Tell the launcher with which code this process exits, if with one that is known by now.

    To be called at exit, before the other ranks lose this one: they ask for its end, and it may
    take long until this rank comes to tell of that as the last thing that it does.
    """
    if _latest is not None:
        _latest.tell_exit()


def _exit(status: Any = None, /) -> NoReturn:
    """Do as the builtins ``exit`` and ``quit``, which raise SystemExit by themselves."""
    sys.exit(status)


class _Witness:
    """Goes with the exception that has it."""


class _Leaving:
    """How this process ends: what is known of it by now, and what follows from that."""

    def __init__(self, always: bool) -> None:
        self.failed: BaseException | None = None  # the first that nobody has caught
        self.asked = 0  # the code that sys.exit was last called with, unless that was caught
        self.witness: weakref.ref[_Witness] | None = None  # of what it was called for last
        self._always = always
        self._rank = os.getpid()
        self._program = _outermost_frame()
        self._exit, self._show = sys.exit, sys.excepthook

    def code(self) -> int:
        """Return what the first of what failed, or else sys.exit, ends this process with."""
        if self.failed is None:
            return self.asked
        codes = {KeyboardInterrupt: 130, PeerLost: LOST_PEER, SystemExit: self.asked or 1}
        return next((c for kind, c in codes.items() if isinstance(self.failed, kind)), 1)

    def exit_with(self, status: Any = None, /) -> NoReturn:
        """Exit as ``sys.exit`` does, and remember the code.

        No hook sees the code of a SystemExit, and at exit it is too late to ask for it.
        """
        if threading.current_thread() is not threading.main_thread():
            self._exit(status)  # ends that thread, and nothing else
        self.witness = None
        self.asked = (status if isinstance(status, int) else 1) if status else 0
        try:
            self._exit(status)
        except SystemExit as error:
            if self.asked:
                # One for both hooks: a second would let the first go.
                witness = vars(error).setdefault("_ringlet", _Witness())
                self.witness = weakref.ref(witness, self.gone)
                del witness
            raise

    def gone(self, _: object) -> None:
        """Forget what was asked for where the program has caught it, and goes on."""
        if sys._getframe().f_back is not None:  # a SystemExit that nobody catches outlives all code
            self.asked = 0

    def note(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Show an exception that nobody has caught, and tell the launcher of it."""
        loss = _loss(error)
        if self.failed is None:
            self.failed = loss or error
        self._show(kind, error, trace)
        if loss is not None:
            report_loss(loss, os.environ)
        if os.getpid() == self._rank:
            tell_leaving(self.code(), os.environ)

    def leave(self) -> None:
        """Tell the launcher, at exit, what this process ends with, and end it if it must leave."""
        returned = self._has_returned()
        if returned:
            self.asked = 0  # it was caught, and is kept: what pytest.raises gives, say
        if self._always and self.asked and self.failed is None:
            self.failed = SystemExit(self.asked)
        if self.failed is None and not self._always and os.getpid() == self._rank:
            known = self.asked or returned or self._program is None
            tell_leaving(self.code() if known else None, os.environ)
        if self.must_leave():
            flush_standard_streams()
            os._exit(self.code())

    def tell_exit(self) -> None:
        """Tell the launcher of the code that the program exits with. What failed was told of."""
        if self.failed is None and self.exits() and os.getpid() == self._rank and not self._always:
            tell_leaving(self.asked, os.environ)

    def exits(self) -> bool:
        """Whether the program ends by a SystemExit with a code, as far as is known at exit."""
        return self.asked != 0 and not self._has_returned()

    def _has_returned(self) -> bool:
        return self._program is not None and _returned(self._program)

    def must_leave(self) -> bool:
        """Whether nothing else may run at exit.

        - Over MPI it may not after a failure: MPI_Finalize waits for the other ranks.
        - Over MPI it may not in a forked child either, which would finalize its parent's.
        - After the loss of another rank it may not anywhere: the code has to say so.
        - Else this process ends as any other does.
        """
        if self._always:
            return self.failed is not None or os.getpid() != self._rank
        return isinstance(self.failed, PeerLost)


_latest: _Leaving | None = None  # each that is hooked hears of what ends this process


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

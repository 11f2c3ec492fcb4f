"""Signals to the launcher, as something its loop can poll."""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from typing import Any

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """While open, takes SIGINT, SIGTERM and SIGHUP for the job instead of for this process.

    Signals that this process ignores (nohup) stay ignored. Off the main thread Python allows no
    handlers: there, nothing ever arrives.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._before: dict[int, Any] = {}
        self._wakeup: int | None = None

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            self._wakeup = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
            for number in PASSED_ON:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):
                    self._before[number] = signal.signal(number, lambda *_: None)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        if self._wakeup is not None:
            signal.set_wakeup_fd(self._wakeup)
        self._reader.close()
        self._writer.close()

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._reader.fileno()

    def arrived(self) -> list[int]:
        """Return the signals since the last call, in order of arrival."""
        with contextlib.suppress(BlockingIOError):
            return [number for number in self._reader.recv(4096) if number in PASSED_ON]
        return []

"""What the launcher starts on another host: ``python -m ringlet.ring.launch.agent``.

It reads its orders, one line of JSON, from the standard input: where the launcher is, the job's
secret, and which wrappers of ranks to start. They report to the launcher by themselves. When the
input ends the launcher or the remote shell is gone: then whatever is left is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from functools import partial
from typing import Any

from ringlet.ring.launch.start import WRAPPER, wrapper_environment
from ringlet.ring.processes import processes

LONGEST = 1 << 20  # bytes of the orders
LEAVE = 3.0  # seconds that programs get to end by themselves once the launcher is gone


def obey(order: dict[str, Any]) -> list[subprocess.Popen[bytes]]:
    """Start the wrappers; of each, the orders hold variables of its own, and credentials of all."""
    me = os.getpid()
    os.environ.update(order.get("credentials", {}))  # a remote shell has brought them
    env = wrapper_environment(order["address"], bytes.fromhex(order["secret"]))
    return [
        subprocess.Popen(
            WRAPPER,
            env=env | own,
            stdin=subprocess.DEVNULL,
            stdout=sys.stderr.fileno(),
            start_new_session=True,
            preexec_fn=partial(processes.die_with_parent, signal.SIGTERM, me),
        )
        for own in order["programs"]
    ]


def attend(woken: socket.socket, commands: int) -> None:
    """Return when no child is left, or when the input has ended and nothing has been left."""
    poll = select.poll()
    poll.register(woken, select.POLLIN)
    poll.register(commands, select.POLLIN)
    while processes.reap() is not None:
        for descriptor, _ in poll.poll():
            if descriptor != commands:
                woken.recv(4096)
            elif not os.read(commands, 4096):
                finish()
                return


def finish() -> None:
    """Wait a moment for the children, who notice by themselves; then kill them."""
    limit = time.monotonic() + LEAVE
    while processes.reap() is not None and time.monotonic() < limit + LEAVE:
        if time.monotonic() > limit:
            processes.kill_children()
        time.sleep(0.01)


def main() -> int:
    """Read the orders and see them through."""
    line = sys.stdin.buffer.readline(LONGEST)
    if not line.endswith(b"\n"):
        print("ringlet agent: the orders did not arrive", file=sys.stderr)
        return 1
    processes.adopt_orphans()
    woken, waker = socket.socketpair()
    waker.setblocking(False)
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        # The input's end says the same, in order. Ignored, it would be so by all ranks here too.
        signal.signal(signal.SIGHUP, lambda *_: None)
    try:
        obey(json.loads(line))
        attend(woken, sys.stdin.fileno())
    except OSError as error:
        print(f"ringlet agent: {error}", file=sys.stderr)
        return 1
    finally:
        with contextlib.suppress(OSError):
            processes.kill_children()
    return 0


if __name__ == "__main__":
    sys.exit(main())

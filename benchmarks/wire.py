"""What it costs that every frame shows who made it: beside sending the same bytes over loopback.

    python benchmarks/wire.py

Prints, by the best of interleaved rounds, microseconds to make a frame and to check it, and to send
it over TCP on loopback and receive it, for control messages of several sizes.
"""

from __future__ import annotations

import argparse
import os
import socket
import time
from collections.abc import Callable

from ringlet.ring.wire.framing import OVERHEAD, Incoming, Outgoing

FRAMES = 500  # a round


def timed(run: Callable[[], object]) -> float:
    """Return microseconds a frame."""
    begin = time.perf_counter()
    run()
    return (time.perf_counter() - begin) / FRAMES * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    listener = socket.create_server(("127.0.0.1", 0))
    one = socket.create_connection(listener.getsockname())
    two, _ = listener.accept()
    for sock in (one, two):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    key = os.urandom(32)
    for size in (20, 40, 200, 1000):
        body, data = os.urandom(size), os.urandom(size + OVERHEAD)
        best = {"make": 1e9, "check": 1e9, "send and receive": 1e9}
        for _ in range(options.rounds):
            out, come = Outgoing(key), Incoming(key, {0}, size)
            frames: list[bytes] = []

            def make(out: Outgoing = out, frames: list[bytes] = frames, body: bytes = body) -> None:
                frames += [out.frame(0, body) for _ in range(FRAMES)]

            def check(come: Incoming = come, frames: list[bytes] = frames) -> None:
                for frame in frames:
                    come.feed(frame)

            def send(data: bytes = data) -> None:
                for _ in range(FRAMES):
                    one.sendall(data)
                    two.recv(1 << 16)

            for name, run in zip(best, (make, check, send), strict=True):
                best[name] = min(best[name], timed(run))
        spent = (best["make"] + best["check"]) / best["send and receive"]
        listed = ", ".join(f"{name} {value:.2f} us" for name, value in best.items())
        print(f"{size} bytes: {listed}; a frame costs {spent:.2f} of that")


if __name__ == "__main__":
    main()

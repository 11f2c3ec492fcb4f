"""One rank of a TCP control plane: ``worker_control.py PORT RANK SIZE``; the secret comes on stdin.

Sends one message, prints what it receives, and stays until it is killed.
"""

import sys

from ringlet.ring.control.opening import join

port, rank, size = map(int, sys.argv[1:])
control = join(("127.0.0.1", port), bytes.fromhex(sys.stdin.readline()), rank, size)
control.send(b"here")
while True:
    for message in control.receive():
        print(message.decode(), flush=True)

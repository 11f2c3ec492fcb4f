"""`ringlet node` as tests start it: on loopback, by numbers."""

import os
import subprocess
import sys

SECRET = "0123456789abcdef0123456789abcdef"


def node(number, count, port, *words, env=None, slots=2, secret=SECRET, by=()):
    place = ["--nodes", str(count), "--node", str(number), "--first", "127.0.0.1"]
    given = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    given |= {"RINGLET_SECRET": secret} if secret else {}
    return subprocess.Popen(
        [*by, sys.executable, "-m", "ringlet", "node", *place, "--port", str(port),
         "--slots", str(slots), *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=given,
    )  # fmt: skip


def ended(process):
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err

"""Jobs of several ranks that share one GPU."""

import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack

from ringlet.ring.processes.torchrun import free_port

GRACE = 20  # seconds for the other ranks to end once one has failed
TOLD = 6000  # last characters of each rank


def run_ranks(worker, size, timeout=180):
    """Run the script ``worker`` on ``size`` ranks; fail unless every one says that it is done.

    Where ranks fail, or do not end in time, what each of them said is told.
    """
    port = free_port()
    with ExitStack() as stack:
        said = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(size)]
        ranks = []
        stack.callback(_end, ranks)
        for rank in range(size):
            env = os.environ | {
                "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo",
                # NCCL refuses two ranks on one GPU of one host, unless told or made to see two.
                "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_HOSTID": f"ringlet-{rank}",
                # Then it would go over an adapter of the host, which may be there by halves.
                "NCCL_NET": "Socket", "NCCL_IB_DISABLE": "1",
                "NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "WARN"), "PYTHONFAULTHANDLER": "1",
            }  # fmt: skip
            command = [sys.executable, str(worker)]
            out = {"stdout": said[rank], "stderr": subprocess.STDOUT}
            ranks.append(subprocess.Popen(command, env=env, **out))
        late = _wait(ranks, time.monotonic() + timeout)
        _end(ranks)
        texts = [_read(file) for file in said]
    codes = ["did not end" if late[rank] else ranks[rank].returncode for rank in range(size)]
    wrong = [r for r in range(size) if codes[r] != 0 or f"rank {r} is done" not in texts[r]]
    told = "\n".join(f"-- rank {r}: {codes[r]}\n{texts[r][-TOLD:]}" for r in range(size))
    assert not wrong, f"ranks {wrong} of {size} failed\n{told}"


def _wait(ranks, deadline):
    """Wait until all ranks have ended, or until ``deadline``; return which have not."""
    failed = False
    while time.monotonic() < deadline:
        running = [process for process in ranks if process.poll() is None]
        if not running:
            break
        if not failed and any(process.returncode for process in ranks):
            failed, deadline = True, min(deadline, time.monotonic() + GRACE)
        try:
            running[0].wait(0.2)
        except subprocess.TimeoutExpired:
            continue
    return [process.poll() is None for process in ranks]


def _end(ranks):
    for process in ranks:
        process.kill()
        process.wait()


def _read(file):
    file.seek(0)
    return file.read()

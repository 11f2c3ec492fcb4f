"""Jobs of several ranks that share one GPU."""

import os
import socket
import subprocess
import sys


def run_ranks(worker, size, timeout=180):
    """Run the script ``worker`` on ``size`` ranks; fail unless every one says that it is done."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(size):
        env = os.environ | {
            "RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo",
            # NCCL refuses two ranks on one GPU of one host, unless told or made to see two hosts.
            "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_HOSTID": f"ringlet-{rank}",
        }  # fmt: skip
        ranks.append(
            subprocess.Popen(
                [sys.executable, str(worker)],
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        said = [process.communicate(timeout=timeout)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    for rank, (process, text) in enumerate(zip(ranks, said, strict=True)):
        assert process.returncode == 0, text
        assert f"rank {rank} is done" in text

"""Pods of an indexed Job meet: namespaces with their environment, their names, and nothing else."""

import re
import subprocess
import sys
from pathlib import Path

import netns
import pytest

missing = netns.unavailable()
pytestmark = pytest.mark.skipif(missing is not None, reason=str(missing))

SUM = (
    "import torch, ringlet.torch as hvd; hvd.init();"
    "total = hvd.allreduce(torch.ones(3) * hvd.rank(), op=hvd.Sum);"
    "print('got', hvd.rank(), hvd.local_rank(), float(total[0]))"
)
DOMAIN = "train.default.svc.cluster.local"


def pod(hosts, index, folder, *words, env):
    # What the kubelet writes for the pod itself, and, for want of a name server, the others' names.
    lines = ["127.0.0.1 localhost", f"10.77.0.{index + 1} train-{index}.{DOMAIN} train-{index}"]
    names = "10.77.0.{} train-{}.train train-{}.{}"
    lines += [names.format(other + 1, other, other, DOMAIN) for other in range(2)]
    (folder / f"hosts{index}").write_text("\n".join(lines) + "\n")
    shell = f'mount --bind {folder}/hosts{index} /etc/hosts && hostname train-{index} && exec "$@"'
    variables = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    variables |= {"JOB_COMPLETION_INDEX": str(index), "RINGLET_SECRET": "s" * 32, **env}
    given = [f"{name}={value}" for name, value in variables.items()]
    command = ["unshare", "-m", "sh", "-c", shell, "sh", "env", "-i", *given, "ringlet", "node"]
    return hosts.popen(
        index, [*command, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize(("slots", "service"), [(2, ["--service", "train"]), (1, [])])
def test_pods_meet_by_their_index_and_the_services_name(tmp_path, slots, service):
    with netns.Hosts(2) as hosts:
        words = ["--nodes", "2", "--slots", str(slots), *service, "--", sys.executable, "-c", SUM]
        pods = [pod(hosts, index, tmp_path, *words, env={}) for index in (1, 0)]
        other, first = (process.communicate(timeout=120) for process in pods)
    assert [process.returncode for process in pods] == [0, 0], (other, first)
    total = float(sum(range(2 * slots)))
    expected = [f"{rank} {rank % slots} {total}" for rank in range(2 * slots)]
    assert sorted(re.findall("got (.*)", first[0])) == expected

"""The examples run as their first lines say, on two ranks, and print what they promise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.preloaded("torch")

ROOT = Path(__file__).parents[2]
RINGLET = [sys.executable, "-m", "ringlet", "run", "-np", "2", sys.executable]
TORCHRUN = [
    sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
    "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0",
]  # fmt: skip


def run(starter, script, *arguments, cwd=ROOT):
    command = [*starter, str(ROOT / "examples" / script), *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, cwd=cwd, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_transformer_and_its_resumption(tmp_path):
    first = run(RINGLET, "pytorch_transformer.py", "--steps", "20", cwd=tmp_path)
    assert "replicas bit-equal: yes" in first
    kept = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert kept == {"model.pt", "optimizer.0.pt", "optimizer.1.pt"}
    again = run(
        RINGLET, "pytorch_transformer.py", "--steps", "30", "--resume", "checkpoints", cwd=tmp_path
    )
    assert "step   20" in again
    assert float(re.search(r"held out ([\d.]+)", again)[1]) < 4.5


def test_embedding():
    text = run(RINGLET, "pytorch_embedding.py")
    before, after = map(float, re.search(r"loss ([\d.]+) -> ([\d.]+)", text).groups())
    assert after < before
    assert "replicas bit-equal: yes" in text


def test_mixed_precision():
    text = run(RINGLET, "pytorch_mixed_precision.py", "--precision", "fp16(init=1024)")
    assert float(re.search(r"accuracy ([\d.]+)", text)[1]) > 80
    assert "replicas bit-equal: yes" in text


def test_ddp():
    text = run(TORCHRUN, "pytorch_ddp.py", "--epochs", "3")
    assert float(re.search(r"accuracy ([\d.]+)", text)[1]) > 75
    assert "replicas bit-equal: yes" in text


def test_fsdp2():
    text = run(TORCHRUN, "pytorch_fsdp2.py", "--steps", "60")
    assert float(re.search(r"accuracy ([\d.]+)", text)[1]) > 80


SCRIPT = """
import os
import sys
import torch
import horovod.torch as hvd
from horovod.common.basics import HorovodBasics
from horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from horovod.common.util import check_extension, split_list
from horovod.runner.util.threads import in_thread
from horovod.torch.elastic.sampler import ElasticSampler
from horovod.torch.mpi_ops import synchronize
from horovod.torch.compression import Compression
import horovod

hvd.init(comm=[0, 1])
assert hvd.mpi_ops._basics._get_process_set_ids_and_ranks() == {0: [0, 1]}
assert HorovodBasics("package").rank() == hvd.mpi_ops.rank() == hvd.rank()
for name in "RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE":
    assert os.environ["HOROVOD_" + name] == str(getattr(hvd, name.lower())()), name
assert os.environ["HOROVOD_HOSTNAME"] == "localhost"
done = []
in_thread(done.append, (3,)).join()
assert done == [3] and split_list([1, 2, 3], 2) == [[1, 2], [3]]
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size())
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=hvd.Compression.fp16
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
total = hvd.allreduce(torch.tensor([float(hvd.rank())]), op=hvd.Sum)
try:
    hvd.allreduce(torch.ones(2 + hvd.rank()), name="shape")
except HorovodInternalError as error:
    print("told:", error)
print(sys.argv[1:], total.item(), Compression is hvd.Compression, horovod.__version__)
"""


@pytest.mark.parametrize("way", ["runner", "install"])
def test_a_script_of_horovods_runs_unchanged(tmp_path, way):
    script = tmp_path / "train.py"
    start = "import ringlet\nringlet.install_as_horovod()\n" if way == "install" else ""
    script.write_text(start + SCRIPT)
    runner = ["-m", "ringlet.as_horovod"] if way == "runner" else []
    done = subprocess.run(
        [*RINGLET, *runner, str(script), "--epochs", "3"],
        capture_output=True, text=True, timeout=120, check=False,
        env=os.environ | {"HOROVOD_THREAD_AFFINITY": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("['--epochs', '3'] 1.0 True 0.28.1") == 2
    assert done.stdout.count("told: allreduce of tensor 'shape'") == 2
    assert done.stderr.count("HOROVOD_THREAD_AFFINITY is Horovod's, and does nothing here") == 1


def test_what_has_no_counterpart_says_so():
    code = "import ringlet; ringlet.install_as_horovod(); import horovod.runner.js_run"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert "Ringlet has nothing that stands for horovod.runner.js_run" in done.stderr
    done = subprocess.run(
        [sys.executable, "-m", "ringlet.as_horovod", "missing.py"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert "there is no script 'missing.py'" in done.stderr


CALLING = """
import sys
import horovod
from horovod.runner import run

def main(epochs, lr):
    import horovod.torch as hvd
    import torch
    hvd.init()
    total = hvd.allreduce(torch.ones(3) * hvd.rank(), op=hvd.Sum)
    return hvd.size(), hvd.__name__, sys.modules["horovod"].__name__, total.tolist(), epochs, lr

if __name__ == "__main__":
    print(horovod.run(main, (3,), {"lr": 0.1}, np=2, use_gloo=True, disable_cache=None))
    print(run(func=main, args=(4,), kwargs={"lr": 0.2}, num_proc=1, use_mpi=False, verbose=0))
"""


def test_horovod_run_gives_its_ranks_horovod(tmp_path):
    script = tmp_path / "job.py"
    script.write_text(CALLING)
    done = subprocess.run(
        [sys.executable, "-m", "ringlet.as_horovod", str(script)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rank = "(2, 'ringlet.torch', 'horovod', [1.0, 1.0, 1.0], 3, 0.1)"
    assert f"[{rank}, {rank}]" in done.stdout
    assert "[(1, 'ringlet.torch', 'horovod', [0.0, 0.0, 0.0], 4, 0.2)]" in done.stdout


SENT = """
import pathlib
import sys
import horovod.common.util as util
from ringlet.job.placed_call import packed

def rank(times):
    import os
    import horovod.torch as hvd
    return hvd.__name__, util.__name__, int(os.environ["HOROVOD_RANK"]) * times

if __name__ == "__main__":
    pathlib.Path(sys.argv[1]).write_bytes(packed(rank, (2,)))
"""

RECEIVED = """
import os, pathlib, sys
from ringlet.job.placed_call import called
from ringlet.ring.rendezvous.place import place_variables
os.environ.update(place_variables(RANK=3))
print(called(pathlib.Path(sys.argv[1]).read_bytes()))
os.environ.update(place_variables(RANK=1))  # of the next job that has this worker
print(called(pathlib.Path(sys.argv[1]).read_bytes()))
"""


def test_workers_of_ray_spark_and_dask_have_horovod(tmp_path):
    script, call = tmp_path / "job.py", tmp_path / "call"
    script.write_text(SENT)
    for command in ["-m", "ringlet.as_horovod", str(script)], ["-c", RECEIVED]:
        done = subprocess.run(
            [sys.executable, *command, str(call)],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    told = [f"('ringlet.torch', 'ringlet.horovod.basics', {number})" for number in (6, 2)]
    assert done.stdout.splitlines() == told


WITH_CHILDREN = """
import multiprocessing
import subprocess
import sys

import horovod.torch as hvd
import torch


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, i):
        return i * torch.ones(1)


def tell(queue):
    code = "import horovod; print(horovod.__version__)"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    queue.put((hvd.__name__, other.stdout.strip()))


if __name__ == "__main__":
    hvd.init()
    loader = torch.utils.data.DataLoader(
        Numbers(), 4, num_workers=1, multiprocessing_context=sys.argv[1]
    )
    context = multiprocessing.get_context(sys.argv[1])
    queue = context.Queue()
    child = context.Process(target=tell, args=(queue,))
    child.start()
    print(sum(float(batch.sum()) for batch in loader), queue.get(timeout=60))
    child.join()
"""


@pytest.mark.parametrize(
    ("method", "job"),
    [("spawn", []), ("forkserver", []), ("forkserver", ["-m", "job"])],
)
def test_children_of_multiprocessing_import_horovod_and_other_programs_their_own(
    tmp_path, method, job
):
    script = tmp_path / "job.py"
    script.write_text(WITH_CHILDREN)
    (tmp_path / "horovod").mkdir()  # a Horovod that is installed
    (tmp_path / "horovod" / "__init__.py").write_text("__version__ = 'of its own'")
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "ringlet.as_horovod", *(job or [str(script)]), method],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": path},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "120.0 ('ringlet.torch', 'of its own')" in done.stdout

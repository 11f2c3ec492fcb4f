"""Scripts in the calls of Horovod's examples run unchanged under as_horovod: all in one job."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ringlet.horovod.aliases import Aliases

pytestmark = pytest.mark.preloaded("tensorflow")

SCRIPTS = Path(__file__).resolve().parent / "horovod_scripts"
NAMES = sorted(path.name for path in SCRIPTS.glob("*.py"))
KERAS_2 = sorted(path.name for path in SCRIPTS.glob("keras_2/*.py"))  # under tf_keras alone
WITH_TF_KERAS = sorted([*KERAS_2, *(name for name in NAMES if not name.startswith("pytorch"))])
DOCUMENT = Path(__file__).parents[2] / "docs" / "migrating-from-horovod.md"


def digits(path: str = "") -> tuple[tuple[object, object], tuple[object, object]]:
    """Stand for what MNIST's files hold: images of 28 x 28 bytes, labels from 0 to 9."""
    import numpy as np

    rng = np.random.default_rng(7)
    labels = rng.integers(0, 10, 320)
    images = rng.integers(0, 64, (320, 28, 28)).astype(np.uint8)
    images[np.arange(320), 2 * labels + 2] = 255
    return (images[:256], labels[:256]), (images[256:], labels[256:])


def main() -> None:
    import runpy

    import keras
    import numpy as np
    import tensorflow as tf
    import torch

    from ringlet.job.session import current, shutdown

    tf.keras.datasets.mnist.load_data = digits
    of_keras_2 = "TF_USE_LEGACY_KERAS" in os.environ
    os.chdir(sys.argv[1] if os.environ["RINGLET_RANK"] == "0" else "/")
    for name in WITH_TF_KERAS if of_keras_2 else NAMES:
        keras.backend.clear_session(free_memory=False)
        if of_keras_2:
            tf.keras.backend.clear_session()
        keras.utils.set_random_seed(int(os.environ["RINGLET_RANK"]))
        for left in Path().glob("checkpoint-*.h5"):  # another script's, in rank 0's folder
            left.unlink()
        path = SCRIPTS / ("keras_2" if name in KERAS_2 else "") / name
        done = runpy.run_path(str(path), run_name="__main__")
        losses = np.array(done["losses"], float)
        assert np.isfinite(losses).all(), losses
        arrays = [v.detach() if isinstance(v, torch.Tensor) else v for v in done["variables"]]
        flat = b"".join(np.array(array).tobytes() for array in arrays)
        same = len(set(current()._comm.allgather_bytes(flat))) == 1
        print(f"={name} {len(losses)} {losses[0]} {losses[-1]} {same}", flush=True)
        shutdown()


def told_by(folder: Path, **environment: str) -> dict[str, list[str]]:
    """Run all scripts in one job, and return what rank 0 told of each."""
    command = [sys.executable, "-m", "ringlet", "run", "-np", "2", "--transport", "gloo"]
    ran = subprocess.run(
        [*command, sys.executable, "-m", "ringlet.as_horovod", __file__, str(folder)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"} | environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = [line[14:].split() for line in ran.stdout.splitlines() if "[0]<stdout>: =" in line]
    return {name: rest for name, *rest in lines}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Return what rank 0 told of each script, on Keras 3 and torch."""
    return told_by(tmp_path_factory.mktemp("scripts"))


@pytest.fixture(scope="module")
def told_of_keras_2(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Return what rank 0 told of each script, where ``tf.keras`` is tf_keras."""
    return told_by(tmp_path_factory.mktemp("keras_2"), TF_USE_LEGACY_KERAS="1")


@pytest.mark.parametrize("name", NAMES)
def test_a_script_in_the_calls_of_an_example_runs(told: dict[str, list[str]], name: str) -> None:
    check(name, *told[name])


@pytest.mark.parametrize("name", WITH_TF_KERAS)
def test_it_runs_on_tf_keras(told_of_keras_2: dict[str, list[str]], name: str) -> None:
    check(name, *told_of_keras_2[name])


def check(name: str, count: str, first: str, last: str, same: str) -> None:
    """See that a script has trained, and all ranks to the same end."""
    assert int(count) > 1
    assert same == "True"
    if "synthetic" not in name:  # which have no more than noise to learn
        assert float(last) < float(first)


@pytest.mark.parametrize("name", sorted({*NAMES, *KERAS_2}))
def test_the_table_has_a_row_for_it(name: str) -> None:
    assert f"`{name}`" in DOCUMENT.read_text()


if __name__ == "__main__":
    main()


def test_what_the_page_says_is_lacking_cannot_be_imported() -> None:
    told = DOCUMENT.read_text().partition("Not there are")[2].partition(".\n")[0]
    lacking = re.findall(r"`(horovod[.\w]*)`", told)
    assert {"horovod.spark.task", "horovod.ray.elastic_v2"} < {*lacking}
    for name in lacking:
        with pytest.raises(ModuleNotFoundError, match=r"migrating-from-horovod\.md lists"):
            Aliases().find_spec(name)


EVERY = """
import importlib
import sys
from ringlet.horovod.aliases import ALIASES

names = list(ALIASES)[:: int(sys.argv[1])]
changed = [name.replace("horovod.", "ringlet.") for name in names]  # as most programs do first
for name in [*names, *changed]:
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        assert "pip install" in str(error), (name, error)
        print("not installed:", name)
    else:
        parent, _, child = name.rpartition(".")
        assert not parent or hasattr(sys.modules[parent], child), name
from horovod.common.elastic import State
from horovod.common.util import env, gloo_built, gpu_available, is_iterable, nccl_built, sycl_built
from horovod.data import AsyncDataLoaderMixin
from horovod.data.data_loader_base import BaseDataLoader
import os
import horovod.torch as hvd
import ringlet.data_loaders

assert BaseDataLoader is ringlet.data_loaders.BaseDataLoader
assert gloo_built(verbose=True) and nccl_built() == hvd.nccl_built()
assert not sycl_built(verbose=True) and not hvd.sycl_built()  # of Horovod's main branch
assert not gpu_available("torch") or hvd.cuda_built()
assert is_iterable("ab") and not is_iterable(1)
with env(LEFT="1", KEPT=None):
    assert os.environ["LEFT"] == "1" and "KEPT" not in os.environ
assert "LEFT" not in os.environ


class Own(State):
    def __init__(self):
        super().__init__(hvd.broadcast_object, get_rank=hvd.rank)

    save = restore = sync = State.reset


Own().register_reset_callbacks([print])
print("imported", len(names))
"""


@pytest.mark.parametrize("order", ["1", "-1"])
def test_every_module_of_horovods_that_is_named_can_be_imported(tmp_path: Path, order: str) -> None:
    script = tmp_path / "every.py"
    script.write_text(EVERY)
    command = [sys.executable, "-m", "ringlet.as_horovod", str(script), order]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "imported" in done.stdout
    assert "not installed: horovod.torch" not in done.stdout


RESET = """
import os

import horovod.tensorflow.keras as hvd
import numpy as np
import tensorflow as tf

hvd.init()
model = tf.keras.Sequential([tf.keras.layers.Dense(1)])
opt = hvd.DistributedOptimizer(tf.optimizers.Adam(0.001 * hvd.size()))
model.compile(optimizer=opt, loss="mse", experimental_run_tf_function=False)
x, y = np.ones((32, 4), "float32"), np.ones((32, 1), "float32")
model.fit(x, y, steps_per_epoch=1, verbose=0)
state = hvd.elastic.KerasState(model, batch=0, epoch=0)


def on_state_reset():
    before = tf.keras.backend.get_value(state.model.optimizer.lr)
    tf.keras.backend.set_value(state.model.optimizer.lr, 0.001 * hvd.size())
    state.model.fit(x, y, steps_per_epoch=1, epochs=1, callbacks=None, verbose=0)
    print(f"reset {before:.3f} {tf.keras.backend.get_value(state.model.optimizer.lr):.3f}")


class Lose(tf.keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if os.environ["HOROVOD_HOSTNAME"] == "127.0.0.1" and state.epoch == 1:
            os._exit(7)


state.register_reset_callbacks([on_state_reset])
callbacks = [
    hvd.elastic.UpdateEpochStateCallback(state),
    hvd.elastic.UpdateBatchStateCallback(state),
    hvd.elastic.CommitStateCallback(state),
    Lose(),
]


@hvd.elastic.run
def train(state):
    state.model.fit(x, y, batch_size=8, epochs=3 - state.epoch, callbacks=callbacks, verbose=0)


train(state)
place = [os.environ[f"HOROVOD_{name}"] for name in ("HOSTNAME", "CROSS_RANK", "CROSS_SIZE")]
print("done", hvd.size(), state.epoch, *place)
"""


def test_a_reset_sets_the_learning_rate_as_keras_2_had_it(tmp_path: Path) -> None:
    script = tmp_path / "elastic.py"
    script.write_text(RESET)
    flags = ["--no-prefix", "-np", "2", "--min-np", "1", "-H", "localhost:1,127.0.0.1:1"]
    program = [sys.executable, "-m", "ringlet.as_horovod", str(script)]
    done = subprocess.run(
        [sys.executable, "-m", "ringlet", "run", *flags, *program],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "reset 0.002 0.001" in done.stdout
    assert "done 1 3 localhost 0 2" in done.stdout

"""Adapters without their framework say in one sentence what to install."""

import os
import subprocess
import sys

import pytest

CASES = [
    ("ringlet.torch", "torch", "torch", "PyTorch: pip install 'ringlet[torch]'"),
    ("ringlet.torch.elastic", "torch", "torch", "PyTorch: pip install 'ringlet[torch]'"),
    ("ringlet.tensorflow", "tensorflow", "tensorflow",
     "TensorFlow: pip install 'ringlet[tensorflow]'"),
    ("ringlet.tensorflow.keras", "tensorflow", "tensorflow",
     "TensorFlow: pip install 'ringlet[tensorflow]'"),
    ("ringlet.tensorflow", "keras", "keras", "Keras: pip install 'ringlet[tensorflow]'"),
    ("ringlet.keras", "keras", "keras", "Keras: pip install 'ringlet[tensorflow]'"),
    ("ringlet.keras", "tensorflow", "tensorflow", "TensorFlow, which Keras runs on here; set "
     "KERAS_BACKEND for another, or install it: pip install 'ringlet[tensorflow]'"),
    ("ringlet.jax", "jax", "jax", "JAX: pip install 'ringlet[jax]'"),
    ("ringlet.jax", "optax", "optax", "optax: pip install 'ringlet[jax]'"),
    ("ringlet.mxnet", "mxnet", "mxnet", "MXNet: pip install --no-deps mxnet requests"),
    ("ringlet.keras", "torch", "torch", "PyTorch, which Keras runs on here; set KERAS_BACKEND for "
     "another, or install it: pip install 'ringlet[torch]'"),
    ("ringlet.ray", "ray", "ray", "Ray: pip install 'ringlet[ray]'"),
    ("ringlet.spark", "pyspark", "pyspark", "Spark: pip install 'ringlet[spark]'"),
    ("ringlet.dask", "distributed", "distributed", "Dask: pip install 'ringlet[dask]'"),
]  # fmt: skip

SCRIPT = """
import importlib.abc, sys

class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == sys.argv[2]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
try:
    __import__(sys.argv[1])
except ImportError as error:
    assert isinstance(error, ModuleNotFoundError), error
    assert error.__cause__ is None and error.__suppress_context__, "internals are shown"
    print(error.name, error, sep="|", end="")
"""


@pytest.mark.parametrize(("adapter", "absent", "name", "said"), CASES)
def test_what_is_missing_is_said_in_one_sentence(adapter, absent, name, said):
    backend = "torch" if absent == "torch" else "tensorflow"
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, adapter, absent],
        capture_output=True,
        text=True,
        timeout=120,
        env={"KERAS_BACKEND": backend, "PATH": "/usr/bin:/bin", "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    assert ran.returncode == 0, ran.stderr
    package = ".".join(adapter.split(".")[:2])
    assert ran.stdout == f"{name}|{package} needs {said}"


def test_rays_executors_need_no_ray_train(tmp_path):
    stand_in = "def __getattr__(name): return type(name, (Exception,), {})"
    for module in ("", "autoscaler", "autoscaler.sdk", "exceptions", "train", "util",
                   "util.placement_group", "util.scheduling_strategies"):  # fmt: skip
        folder = tmp_path.joinpath("ray", *module.split("."))
        folder.mkdir(parents=True, exist_ok=True)
        text = "raise ImportError('no pandas here')" if module == "train" else stand_in
        (folder / "__init__.py").write_text(text)
    code = "from ringlet.ray import ElasticRayExecutor, RayExecutor\nimport ringlet.ray\n"
    code += "try: ringlet.ray.RingletConfig\nexcept ImportError as error: print(error, end='')"
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    ran = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"PYTHONPATH": paths},
    )
    assert (ran.returncode, ran.stdout) == (0, "no pandas here"), ran.stderr


def test_what_is_installed_and_broken_says_so_itself(tmp_path, monkeypatch):
    from ringlet.job.requirements import need

    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("import no_such_library")
    monkeypatch.syspath_prepend(tmp_path)
    for known in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
        monkeypatch.delitem(sys.modules, known)
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        need("torch", "ringlet.torch")


def test_torchs_compiler_is_not_imported(tmp_path):
    # It takes a second, in every rank, and makes a folder among the temporary files.
    code = "import sys, ringlet.torch; sys.exit('torch._dynamo' in sys.modules)"
    env = os.environ | {"TMPDIR": str(tmp_path)}
    assert subprocess.run([sys.executable, "-c", code], env=env, timeout=120).returncode == 0
    assert not list(tmp_path.iterdir())

"""What adapters need that is not installed with Ringlet, in one sentence each."""

from __future__ import annotations

from importlib import import_module

_EXTRAS = {"torch": "torch", "tensorflow": "tensorflow", "keras": "tensorflow", "jax": "jax"}
_EXTRAS |= {"optax": "jax", "ray": "ray", "pyspark": "spark", "distributed": "dask"}
_NAMES = {"torch": "PyTorch", "tensorflow": "TensorFlow", "keras": "Keras", "jax": "JAX"}
_NAMES |= {"optax": "optax", "mxnet": "MXNet"}
_NAMES |= {"ray": "Ray", "pyspark": "Spark", "distributed": "Dask"}
# It asks for an older NumPy than Ringlet, and works with this one.
_PLAINLY = {"mxnet": "--no-deps mxnet requests"}
_BACKEND = ", which Keras runs on here; set KERAS_BACKEND for another, or install it"


def need(module: str, adapter: str) -> None:
    """Import ``module`` for ``adapter``; ModuleNotFoundError, saying what to install, without it.

    Keras's backend counts as well. What is installed and broken raises what it raises.
    """
    try:
        import_module(module)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _NAMES:
            raise
        why = _BACKEND if module == "keras" and missing != "keras" else ""
        what = f"'ringlet[{_EXTRAS[missing]}]'" if missing in _EXTRAS else _PLAINLY[missing]
        text = f"{adapter} needs {_NAMES[missing]}{why}: pip install {what}"
        raise ModuleNotFoundError(text, name=missing) from None

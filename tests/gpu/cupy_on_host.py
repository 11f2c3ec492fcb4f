"""A plugin of pytest: what stands for CuPy, over kernels compiled for the host, with graphs.

With it the tests for GPUs run without one, so that what is wrong in these themselves shows. What is
captured is launches of our kernels, and nothing that array code does.
"""

import sys
import types

import hostdevice


class Recording(hostdevice.HostDevice):
    """A device whose launches are noted, and not run, while a graph is captured."""

    noted = None

    def launch(self, program, kernel, blocks, table):
        if self.noted is None:
            super().launch(program, kernel, blocks, table)
        else:
            self.noted.append((program, kernel, blocks, table.copy()))  # passed by value


class Stream:
    """The one stream, whose work is done at once."""

    def __init__(self, device):
        self.device = device

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def synchronize(self):
        pass

    def begin_capture(self):
        self.device.noted = []

    def end_capture(self):
        noted, self.device.noted = self.device.noted, None
        return types.SimpleNamespace(launch=lambda stream: [self.device.launch(*n) for n in noted])


def pytest_configure():
    device = Recording(hostdevice.CACHE)
    stream = Stream(device)
    cupy = hostdevice.array_module(device, "cupy")
    cupy.cuda = types.SimpleNamespace(
        Stream=lambda non_blocking: stream,
        Device=lambda: stream,
        runtime=types.SimpleNamespace(getDeviceCount=lambda: 1, deviceSynchronize=lambda: None),
    )
    sys.modules["cupy"] = cupy

"""How kernels are loaded and launched over CuPy, with a stand-in for CuPy."""

import logging
import sys
import types

import numpy as np
import pytest

from ringlet.compressors import parse
from ringlet.compressors.kernels.cuda.runtime import device as module
from ringlet.compressors.kernels.cuda.runtime.device import CupyDevice, device_of


class Cupy:
    """What CupyDevice uses of CuPy; ``seen`` notes what it is asked for."""

    def __init__(self):
        self.seen, self.number = [], 0
        runtime = types.SimpleNamespace(getDevice=lambda: self.number, is_hip=False)
        seen = self.seen

        class Module:
            def load(self, binary):
                seen.append(("load", binary))

            def get_function(self, name):
                return lambda *call: seen.append((name, *call))

        def device(number):
            return types.SimpleNamespace(compute_capability="90")

        function = types.SimpleNamespace(Module=Module)
        stream = types.SimpleNamespace(synchronize=lambda: seen.append("waited"))
        self.cuda = types.SimpleNamespace(
            runtime=runtime, function=function, Device=device, get_current_stream=lambda: stream
        )

    def asarray(self, array):
        self.seen.append(("asarray", array.size))
        return array.copy()


@pytest.fixture
def cupy(monkeypatch):
    made = Cupy()
    cuda = types.ModuleType("cupy.cuda")
    cuda.nvrtc = "nvrtc"
    monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))
    monkeypatch.setitem(sys.modules, "cupy.cuda", cuda)
    monkeypatch.setattr(module, "binary", lambda program, cc, nvrtc: (program.parts, cc, nvrtc))
    return made


def test_a_program_is_loaded_once_for_each_gpu(cupy):
    device, program = CupyDevice(cupy), parse("int8").cuda().program("encode")
    table = np.zeros(1, np.int64)
    for cupy.number in (0, 0, 1, 0):
        device.launch(program, "encode", 3, table)
    loads = [what for what in cupy.seen if what[0] == "load"]
    assert loads == [("load", (program.parts, 90, "nvrtc"))] * 2
    calls = [what for what in cupy.seen if what[0] == "encode"]
    assert [call[1:3] for call in calls] == [((3,), (256,))] * 4
    assert all(call[3][0] is table for call in calls)


def test_constants_are_copied_once_for_each_gpu_before_another_stream_reads_them(cupy):
    device, matrix = CupyDevice(cupy), np.eye(2)
    for cupy.number in (0, 0, 1):
        device.constant("matrix", matrix)
    assert cupy.seen == [("asarray", 4), "waited"] * 2


def test_an_address_is_that_of_the_first_element():
    array = types.SimpleNamespace(data=types.SimpleNamespace(ptr=4096))
    assert CupyDevice(types.ModuleType("cupy")).address(array) == 4096


def test_other_array_modules_have_no_kernels(caplog):
    assert device_of(types.ModuleType("dpnp")) is None
    rocm = types.ModuleType("cupy")
    rocm.cuda = types.SimpleNamespace(runtime=types.SimpleNamespace(is_hip=True))
    with caplog.at_level(logging.WARNING):
        assert device_of(rocm) is None
    assert "ROCm" in caplog.text

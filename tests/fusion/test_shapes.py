"""Tensors that change their shape between steps."""

import numpy as np
import pytest
from engines import with_engines

from ringlet.compressors import parse
from ringlet.fusion import Request
from ringlet.ring.errors import Mismatch


def submit(engine, shape, spec="int8 | ef"):
    n = int(np.prod(shape))
    request = Request("x", shape=shape, spec=spec)
    return engine.submit(request, np.ones(n, np.float32), compressor=parse(spec)).wait(60)


def test_a_compressed_tensor_cannot_change_its_shape_under_its_name():
    def body(engine):
        submit(engine, (40, 50))
        said = r"'x' has shape \[50, 50\] now and had \[40, 50\] before; what 'int8 \| ef' remem"
        with pytest.raises(ValueError, match=said):
            submit(engine, (50, 50))
        submit(engine, (40, 50))

    with_engines(2, body)


def test_an_uncompressed_tensor_can_if_all_ranks_agree():
    def body(engine):
        for shape in ((40, 50), (3,), (40, 50)):
            assert submit(engine, shape, "none").size == np.prod(shape)
        with pytest.raises(Mismatch, match="shapes differ between ranks"):
            submit(engine, (engine.rank + 1,), "none")
        submit(engine, (3,), "none")

    with_engines(2, body)


def test_a_declared_tensor_cannot_change_its_size():
    def body(engine):
        group = engine.declare("g", [Request("w", shape=(4, 5))], [parse("none")], [{}])
        group.submit("w", np.ones(20, np.float32))
        group.wait(60)
        said = r"'w' has 21 elements in step 1 of 'g'; it was declared with shape \[4, 5\], .* 20"
        with pytest.raises(ValueError, match=said):
            group.submit("w", np.ones(21, np.float32))
        group.submit("w", np.ones(20, np.float32))
        group.wait(60)

    with_engines(2, body)

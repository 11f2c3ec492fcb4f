"""The checksum: equal to its definition, blind to nothing small."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlet.ring.collectives import weighted_sums
from ringlet.ring.collectives.checksum import checksum, digest


def definition(payload, *fields):
    """The module's description in Python integers."""
    data = bytes(payload)
    filled = data + bytes(-len(data) % 4)
    words = [int.from_bytes(filled[i : i + 4], "little") for i in range(0, len(filled), 4)]
    total = sum(w * ((i * 0x3C6EF372 + 1) % 2**32) for i, w in enumerate(words)) % 2**64
    for field in (len(data), *fields):
        total = (total ^ field) * 0x9E3779B97F4A7C15 % 2**64
        total ^= total >> 29
    return total


def array(data, offset=0):
    return np.frombuffer(bytes(offset) + data, np.uint8)[offset:]


class Always:
    """A choice that is made: by kernels, or by NumPy."""

    def __init__(self, kernels):
        self.kernels = kernels

    def compiled(self, nbytes):
        return self.kernels


@given(st.binary(max_size=300), st.lists(st.integers(0, 2**64 - 1), max_size=3), st.integers(0, 3))
def test_it_equals_its_definition_wherever_the_payload_lies(data, fields, offset):
    assert checksum(array(data, offset), *fields) == definition(data, *fields)


@settings(max_examples=500)
@given(st.binary(min_size=1, max_size=300), st.data())
def test_one_or_two_flipped_bits_are_found(data, draw):
    bits = st.integers(0, 8 * len(data) - 1)
    flipped = bytearray(data)
    for bit in draw.draw(st.sets(bits, min_size=1, max_size=2)):
        flipped[bit // 8] ^= 1 << bit % 8
    assert checksum(array(bytes(flipped))) != checksum(array(data))


@given(st.lists(st.integers(0, 2**32 - 1), min_size=2, max_size=60, unique=True), st.data())
def test_two_words_that_changed_places_are_found(words, draw):
    i, j = draw.draw(st.sets(st.integers(0, len(words) - 1), min_size=2, max_size=2))
    swapped = list(words)
    swapped[i], swapped[j] = words[j], words[i]
    before, after = (np.array(w, np.uint32).view(np.uint8) for w in (words, swapped))
    assert checksum(before) != checksum(after)


@given(st.binary(max_size=100), st.integers(1, 20))
def test_zeros_at_the_end_count(data, n):
    assert checksum(array(data + bytes(n))) != checksum(array(data))


def test_large_payloads_of_one_byte_value_differ_by_any_byte():
    payload = np.full(1 << 20, 255, np.uint8)
    whole = checksum(payload)
    for place in (0, 3, 70001, (1 << 20) - 1):
        payload[place] = 254
        assert checksum(payload) != whole
        payload[place] = 255


@pytest.mark.parametrize("dtype", ["uint8", "float16", "bfloat16", "float32", "float64"])
def test_numpy_and_kernels_say_the_same(monkeypatch, dtype):
    rng = np.random.default_rng(0)
    name = "uint16" if dtype == "bfloat16" else dtype
    for n in (0, 1, 7, 8192, 8193, 100_003):
        values = rng.integers(0, 256, n * np.dtype(name).itemsize, np.uint8).view(name)  # NaNs too
        if n == 8192 and name.startswith("float"):
            values = np.where(np.isnan(values), 0, values).astype(name)
        for one_zero in (False, True):
            told = set()
            for kernels in (False, True):
                monkeypatch.setattr(weighted_sums, "choice", Always(kernels))
                told.add((digest(values, dtype, one_zero), checksum(values.view(np.uint8), 5)))
            assert len(told) == 1, (dtype, n, one_zero)


def test_numpy_adds_what_is_small_until_it_has_added_much(monkeypatch):
    monkeypatch.delitem(sys.modules, "numba", raising=False)
    choice = weighted_sums.Choice()
    assert choice.compiled(weighted_sums.MOST + 1)
    assert not choice.compiled(weighted_sums.MOST)
    calls = weighted_sums.BUDGET // (weighted_sums.MOST + weighted_sums.CALL)
    assert [choice.compiled(weighted_sums.MOST) for _ in range(calls + 1)] == [False] * calls + [
        True
    ]
    monkeypatch.setitem(sys.modules, "numba", object())
    assert weighted_sums.Choice().compiled(4)


def test_a_program_that_reduces_little_loads_no_numba():
    program = """
import sys
import numpy as np
from ringlet.fusion import Engine, Limits, Request
from ringlet.ring.control.opening import open_control
from ringlet.ring.transports.local import run_local

def rank(comm):
    engine = Engine(comm, open_control, Limits())
    total = engine.submit(Request("x", "allreduce", "float32", (9000,)), np.ones(9000, "f")).wait()
    engine.shutdown()
    return float(total.sum())

assert run_local(rank, 2) == [9000.0, 9000.0]
assert "numba" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)

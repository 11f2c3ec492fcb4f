"""Payloads as bytes: what goes in comes out, and nonsense is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ringlet.compressors import PayloadError
from ringlet.compressors.core.payload import check_payload, deserialise, serialise, serialised_size

arrays = st.sampled_from(
    ["uint8", "int16", "uint32", "int64", "float16", "float32", "bool"]
).flatmap(lambda dtype: hnp.arrays(dtype, st.integers(0, 40)))
payloads = st.dictionaries(st.text(min_size=1, max_size=9), arrays, max_size=5)


@given(payloads)
def test_round_trip(payload):
    check_payload("x", payload)
    out = np.empty(serialised_size(payload), np.uint8)
    assert serialise(payload, out) == out.size
    back = deserialise(out)
    assert list(back) == list(payload)
    for name in payload:
        assert back[name].dtype == payload[name].dtype
        assert back[name].tobytes() == payload[name].tobytes()


@given(payloads, st.data())
def test_truncation_and_corruption_are_refused_or_read_within_bounds(payload, data):
    out = np.empty(serialised_size(payload), np.uint8)
    serialise(payload, out)
    cut = out[: data.draw(st.integers(0, out.size - 1))]
    with pytest.raises(PayloadError):
        deserialise(cut)
    flipped = out.copy()
    flipped[data.draw(st.integers(0, out.size - 1))] ^= data.draw(st.integers(1, 255))
    try:
        arrays = deserialise(flipped)
    except PayloadError:
        return
    assert sum(array.nbytes for array in arrays.values()) <= flipped.size


@pytest.mark.parametrize(
    "payload",
    [
        None,
        [np.zeros(3)],
        {"values": [1, 2]},
        {"values": np.zeros((2, 2), np.float32)},
        {3: np.zeros(2, np.float32)},
        {"values": np.zeros(2, np.complex64)},
        {"values": np.array([object()])},
    ],
)
def test_what_cannot_travel_is_named(payload):
    with pytest.raises(PayloadError, match="mine"):
        check_payload("mine", payload)

"""The checksum: equal to its definition, blind to nothing small."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlet.ring.collectives.checksum import checksum


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

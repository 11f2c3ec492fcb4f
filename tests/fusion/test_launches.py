"""Members of a bucket in common launches: who is named when something goes wrong."""

import numpy as np
import pytest

from ringlet.compressors import parse
from ringlet.compressors.core.errors import PayloadError
from ringlet.compressors.core.multitensor import Spaced
from ringlet.fusion import CompressionFailed, Request
from ringlet.fusion.codecs.cuda_codec import DeviceCodec
from ringlet.fusion.codecs.launched_members import Launches, Shard
from ringlet.fusion.devices.host import Place
from ringlet.fusion.planning.member import Member


class Broken:
    """Kernels that always fail."""

    def __init__(self, error):
        self.error = error

    def encode(self, tensors, spaced=None, scale=1.0, decay=1.0, weight=1.0):
        raise self.error

    def decode(self, tensors, spaced=None, scale=1.0, weight=1.0):
        raise self.error


def member(name, spec="int8 | ef", dtype="float32"):
    request = Request(name, shape=(8, 300), spec=spec, dtype=dtype)
    found = Member(request, parse(spec), 0, 2, 0, Place())
    found.take(np.ones(2400, dtype), np.empty(2400, dtype))
    return found


def shards(members):
    return [Shard(m, 0, m.numel, {}, m.context(0, 1)) for m in members]


@pytest.mark.parametrize("method", ["encode", "encode_sums", "decode"])
@pytest.mark.parametrize(
    ("count", "named"),
    [
        (1, r"of tensor 'w0' \[8, 300\]: KeyError: 'keys'$"),
        (2, "of tensors 'w0', 'w1': KeyError: 'keys'$"),
        (40, "of tensors 'w0', 'w1', 'w2' and 37 more: KeyError: 'keys'$"),
    ],
)
def test_the_compressor_and_the_tensors_of_a_launch_are_named(method, count, named):
    members = [member(f"w{i}") for i in range(count)]
    launches = Launches(members, Broken(KeyError("keys")))
    how = {"encode": (), "encode_sums": (Spaced(2, 8),), "decode": (True,)}[method]
    kernel = "decode" if method == "decode" else "encode"
    with pytest.raises(CompressionFailed, match=f"'int8 | ef' failed in {kernel} {named}"):
        getattr(launches, method)(shards(members), *how)


def test_what_a_compressor_says_itself_is_told_as_it_is():
    members = [member("w")]
    launches = Launches(members, Broken(PayloadError("too short")))
    with pytest.raises(CompressionFailed, match=r"'w' \[8, 300\]: too short$"):
        launches.encode(shards(members))


def test_a_tensor_that_alone_is_to_blame_is_named_alone(monkeypatch):
    members = [member("w"), member("wide", dtype="float64")]
    launches = Launches(members[1:], Broken(KeyError("keys")))

    def fail(*_):
        raise KeyError("keys")

    monkeypatch.setattr(type(members[1].compressor), "encode_into", fail)
    with pytest.raises(CompressionFailed, match=r"tensor 'wide' \[8, 300\]: KeyError"):
        launches.encode(shards(members[1:]))


def test_without_kernels_there_are_no_launches():
    assert Launches.of([member("w")]) is None
    assert Launches.of([member("w"), member("v", "int4")]) is None


def test_payloads_that_lie_unevenly_are_refused():
    codec, buffer = DeviceCodec([member("w")], 1), np.zeros(100, np.uint8)
    even = [buffer[start : start + 10] for start in (0, 10, 20)]
    assert codec._spacing(even) == (3, 10)
    with pytest.raises(PayloadError, match=r"\[10, 20\] bytes apart"):
        codec._spacing([*even, buffer[40:50]])
    with pytest.raises(PayloadError, match=r"have \[8, 10\] bytes"):
        codec._spacing([*even, buffer[30:38]])

"""The registry: plugins by decorator and by entry point."""

from importlib import metadata

import numpy as np
import pytest

from ringlet import compressors
from ringlet.compressors import (
    Compressor,
    CompressorError,
    Context,
    OptionError,
    UnknownCompressor,
    lookup,
    names,
    option,
    parse,
    register,
)
from ringlet.compressors.specs import registry


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch):
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))


def test_a_plugin_of_two_methods_works_by_name():
    @register("halve")
    class Halve(Compressor):
        """Keep the first half."""

        share: float = 0.5

        def compress(self, x, ctx):
            return {"values": x[: int(x.size * self.share)]}

        def decompress(self, payload, out, ctx):
            out[:] = 0
            out[: payload["values"].size] = payload["values"]

    compressor = parse("halve(share=0.25)")
    assert compressor == Halve(0.25)
    assert str(compressor) == "halve(share=0.25)"
    x, out = np.arange(8, dtype=np.float32), np.empty(8, np.float32)
    compressor.decompress(compressor.compress(x, Context()), out, Context())
    assert out.tolist() == [0, 1, 0, 0, 0, 0, 0, 0]


def test_a_name_is_never_silently_replaced():
    class Other(Compressor):
        pass

    with pytest.raises(CompressorError, match="'int8' is"):
        register("int8")(Other)
    with pytest.raises(CompressorError, match="lower-case identifier"):
        register("Not A Name")


def test_a_class_may_be_defined_again_in_place():
    def define():
        @register("again")
        class Again(Compressor):
            pass

        return Again

    first, second = define(), define()
    assert lookup("again") is second is not first


def test_what_is_not_a_compressor_is_refused():
    with pytest.raises(CompressorError, match="subclass of Compressor"):
        register("thing")(int)  # type: ignore[type-var]


def test_options_need_defaults_and_no_init():
    with pytest.raises(TypeError, match="ratio"):

        class NoDefault(Compressor):
            ratio: float

    with pytest.raises(TypeError, match="declare options as attributes"):

        class OwnInit(Compressor):
            def __init__(self):
                pass


def test_choices_are_checked():
    class Rounding(Compressor):
        mode: str = option("nearest", choices=("nearest", "stochastic"))

    assert Rounding("stochastic").mode == "stochastic"
    with pytest.raises(OptionError, match="one of 'nearest', 'stochastic'"):
        Rounding("up")


class FakeDist:
    def __init__(self, name):
        self.name = name


def entry(name, value, package):
    point = metadata.EntryPoint(name, value, registry.GROUP)
    return point._for(FakeDist(package))


def test_entry_points_load_lazily_and_conflicts_are_told(monkeypatch):
    points = [
        entry("fromplugin", "json:JSONDecoder", "somepackage"),
        entry("missing", "no_such_module_at_all:X", "otherpackage"),
        entry("twice", "a:A", "first"),
        entry("twice", "b:B", "second"),
    ]
    monkeypatch.setattr(registry, "_plugins", lambda: metadata.EntryPoints(points))
    assert {"fromplugin", "missing", "twice", "int8"} <= set(names())
    with pytest.raises(CompressorError, match="subclass of Compressor"):
        lookup("fromplugin")
    with pytest.raises(CompressorError, match="otherpackage does not import"):
        lookup("missing")
    with pytest.raises(CompressorError, match=r"first.*second"):
        lookup("twice")
    for slip in ("fromplugn", "FromPlugin"):
        with pytest.raises(UnknownCompressor, match="did you mean 'fromplugin'"):
            lookup(slip)


def test_every_compressor_of_our_own_is_a_name_of_the_package():
    for name, cls in registry.built_in().items():
        assert getattr(compressors, cls.__name__) is cls, name
        assert cls.__name__ in compressors.__all__

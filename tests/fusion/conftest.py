"""Plugins that fail when a test says so, and where the stand-in for a GPU is."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from ringlet.compressors import Compressor, Context, Traits, parse, register
from ringlet.compressors.specs import registry
from ringlet.fusion import Request


@pytest.fixture
def brittle(monkeypatch):
    """Return a dict whose "when" tells, of a context, whether the compressor "brittle" fails."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    fault = {}

    @register("brittle")
    class Brittle(Compressor):
        def traits(self):
            return Traits(fixed_size=True, granularity=1)

        def layout(self, n):
            return parse("none").layout(n)

        def compress(self, x, ctx: Context):
            if fault.get("when", lambda ctx: False)(ctx):
                raise KeyError("lost my keys")
            return {parse("none").layout(x.size)[0].name: x.copy()}

        def decompress(self, payload, out, ctx: Context):
            (out[:],) = payload.values()

    return fault


@pytest.fixture
def reducer():
    """Return a function that gives an engine's ``step(x)`` for one tensor, declared or not."""

    def prepare(engine, n, declared):
        request, compressor = Request("w", shape=(n,), spec="brittle"), parse("brittle")
        if not declared:
            return lambda x: engine.submit(request, x, compressor=compressor).wait(60)
        group = engine.declare("g", [request], [compressor], [{}])

        def step(x):
            group.submit("w", x)
            group.wait(60)

        return step

    return prepare

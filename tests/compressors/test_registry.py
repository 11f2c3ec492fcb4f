"""The registry: plugins by decorator and by entry point."""

import warnings
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest

from ringlet import compressors
from ringlet.compressors import (
    Compressor,
    CompressorError,
    Context,
    OptionError,
    Traits,
    UnknownCompressor,
    lookup,
    names,
    option,
    parse,
    register,
)
from ringlet.compressors.specs import registry
from ringlet.compressors.specs.edition import edition

SEVEN = 7


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

    with warnings.catch_warnings():  # ranks that overflow in opposite directions
        warnings.simplefilter("error")
        infinities = [compressor.compress(bad * np.ones(8, np.float32), Context())
                      for bad in (np.inf, -np.inf)]  # fmt: skip
        compressor.sum_into(infinities, out, Context())
    assert np.isnan(out).tolist() == [True] * 2 + [False] * 6


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


@pytest.mark.parametrize("word", ["lambda", "in", "class"])
def test_a_name_is_no_word_of_python(word):
    with pytest.raises(CompressorError, match=f"{word!r}, a word of Python's, which no spec can"):
        register(word)


def test_the_decorator_wants_a_name():
    with pytest.raises(CompressorError, match=r"wants a name, as in @register\('sign'\)"):

        @register
        class Bare(Compressor):
            pass


@pytest.mark.parametrize(
    ("traits", "says"),
    [
        (Traits(), r"Wrong: traits is a value; define it as a method, def traits\(self\)"),
        (lambda self: None, r"Wrong: traits\(\) returns NoneType; return Traits\(...\)"),
        (lambda self: {"combine": "sum"}, r"Wrong: traits\(\) returns dict; return Traits"),
        (lambda self: Traits, r"Wrong: traits\(\) returns Traits, the class"),
        (lambda self: Traits(combine="mean"), "combine must be 'sum', 'gather' or 'rounds', not"),
    ],
)
def test_wrong_traits_are_told_wherever_they_are_asked_for(traits, says):
    wrong = type("Wrong", (Compressor,), {"traits": traits, "__module__": __name__})
    for use in (lambda: wrong().traits(), lambda: wrong() | parse("ef")):
        with pytest.raises(CompressorError, match=says):
            use()


def test_a_schedule_returns_compressors():
    class Ends(Compressor):
        def at(self, step):
            return None if step else self

    assert Ends().at(0) == Ends()
    with pytest.raises(CompressorError, match=r"Ends: at\(3\) returns NoneType; .* self where not"):
        Ends().at(3)


def test_editions_of_a_plugin_go_by_its_source(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    source = "from ringlet.compressors import TopK\nclass Mine(TopK):\n    ratio: float = {}\n"
    editions = {}
    for module, ratio in (("edition_a", 0.1), ("edition_b", 0.1), ("edition_c", 0.2)):
        (tmp_path / f"{module}.py").write_text(source.format(ratio))
        editions[module] = edition(parse(f"{module}:Mine | ef"))
    a, b, c = (text.partition(" ")[2] for text in editions.values())
    assert editions["edition_a"].startswith("edition_a of source ")
    assert a == b != c
    assert edition(parse("topk | int8 | ef")) == ""


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


def test_what_is_no_option_says_why():
    with pytest.raises(TypeError, match=r"Untyped: an option has a type; write ratio: float = opt"):

        class Untyped(Compressor):
            ratio = option(0.1)

    with pytest.raises(TypeError, match=r"Listed: mutable default <class 'list'> .* option is"):

        class Listed(Compressor):
            sizes: list = []  # noqa: RUF012

    class Plain(Compressor):
        ratio = 0.1

    with pytest.raises(
        OptionError, match=r"for one has a type: write ratio: float = 0.1 in the class"
    ):
        Plain(ratio=0.2)
    with pytest.raises(OptionError, match=r"int8 has no option 'bits'\. Options: bucket=512"):
        parse("int8(bits=4)")


def test_a_default_out_of_its_range_is_the_authors():
    class Share(Compressor):
        ratio: float = option(10.0, le=1)
        clip: float | None = option(None, gt=0)

    with pytest.raises(OptionError, match=r"must be <= 1, got 10\.0, which is its own default"):
        Share()
    with pytest.raises(OptionError, match=r"clip must be > 0, got 'a'$"):
        Share(ratio=0.5, clip="a")


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


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("nowhere", "json", "of package its is 'json': that is a module, not a class derived from"),
        ("unread", "my json:::", "is 'my json:::' among its entry points; write MODULE:NAME"),
        ("nothing", "json:JSON", "of package its does not import: AttributeError: "),
        ("Upper", "broken.right:Whole", "of package its cannot be used: .*; write 'upper'"),
        ("seven", f"{__name__}:SEVEN", "that is an int, not a class"),
    ],
)
def test_an_entry_point_that_is_none_names_its_package(monkeypatch, name, value, says):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    points = metadata.EntryPoints([entry(name, value, "its")])
    monkeypatch.setattr(registry, "_plugins", lambda: points)
    with pytest.raises(CompressorError, match=says):
        lookup(name)


def test_every_compressor_of_our_own_is_a_name_of_the_package():
    for name, cls in registry.built_in().items():
        assert getattr(compressors, cls.__name__) is cls, name
        assert cls.__name__ in compressors.__all__

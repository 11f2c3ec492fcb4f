"""Spec strings: what they mean, and what their errors say."""

import abc
import contextlib
import traceback

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlet.compressors import (
    BF16,
    FP16,
    Chain,
    Compressor,
    CompressorError,
    ErrorFeedback,
    Int8,
    NoCompression,
    OptionError,
    Router,
    SpecError,
    TopK,
    UnknownCompressor,
    parse,
    resolve,
)
from ringlet.compressors.specs.parser import LONGEST, MOST

AN_INSTANCE = Int8()


def a_function():
    """Stand where somebody looks for a class."""


plain = st.one_of(
    st.just(NoCompression()),
    st.just(FP16()),
    st.just(BF16()),
    st.builds(Int8, st.integers(4, 8192).map(lambda n: 8 * n), st.booleans()),
    st.builds(TopK, st.floats(1e-6, 1.0)),
)
feedback = st.builds(ErrorFeedback, st.floats(0.01, 1.0))
chains = st.builds(lambda k, b: k | b, st.builds(TopK), st.builds(Int8))
compressors = st.one_of(
    plain, chains, st.builds(lambda c, f: c | f, st.one_of(plain, chains), feedback)
)


@given(compressors)
def test_text_and_value_are_the_same_thing(compressor):
    assert parse(str(compressor)) == compressor
    assert hash(parse(str(compressor))) == hash(compressor)
    assert eval(repr(compressor), globals()) == compressor


def test_a_spec_equals_the_expression_it_spells():
    spec = "topk(ratio=0.02) | int8 | ef"
    assert parse(spec) == TopK(0.02) | Int8() | ErrorFeedback()
    assert parse("topk(0.02)|int8|ef") == parse(spec)
    assert parse("topk | (int8 | ef)") == parse("topk | int8 | ef")
    assert isinstance(parse("topk | int8"), Chain)


def test_a_spec_may_go_over_lines():
    assert parse("topk |\n    int8 |\n\tef\n") == parse("topk | int8 | ef")


def test_a_compressor_is_frozen():
    with pytest.raises(AttributeError):
        Int8().bucket = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("spec", "kind", "says"),
    [
        ("tpok", UnknownCompressor, "did you mean 'topk'?"),
        ("int8 | fe", UnknownCompressor, "    int8 | fe\n           ^"),
        ("topk(ration=0.1)", OptionError, "did you mean 'ratio'? Options: ratio=0.01"),
        ("topk(ratio=2)", OptionError, "ratio must be > 0 and <= 1, got 2.0"),
        ("topk(ratio='1')", OptionError, "ratio must be float, got '1' (str)"),
        ("topk(0.1, 0.2)", OptionError, "topk got 2 options, it has 1: ratio=0.01"),
        ("int8(bucket=True)", OptionError, "bucket must be int, got True (bool)"),
        ("int8(31)", OptionError, "bucket must be >= 32 and <= 65536, got 31"),
        ("ef(decay=0)", OptionError, "decay must be > 0 and <= 1, got 0.0"),
        ("int8 |", SpecError, "    int8 |\n         ^"),
        (
            "topk(ratio=0.1 | ef",
            SpecError,
            "this '(' is never closed; write ')' behind the options\n"
            "    topk(ratio=0.1 | ef\n        ^",
        ),
        ("topk | | ef", SpecError, "missing before this '|'; write one there, or leave '|' away"),
        ("topk | | ef", SpecError, "    topk | | ef\n           ^"),
        ("| ef", SpecError, "missing before this '|'"),
        ("(int8 | ) | ef", SpecError, "missing behind this '|'"),
        ("topk ef", SpecError, "a '|' is missing before 'ef', between two compressors"),
        ("topk(0.1) ef", SpecError, "    topk(0.1) ef\n              ^"),
        ("topk)", SpecError, "this ')' closes nothing"),
        ("topk | (int8", SpecError, "write ')' behind what it groups"),
        ("topk(ratio=)", SpecError, "an option has no value; write for example"),
        ("topk(ratio=0.1 sample=2)", SpecError, "a ',' is missing before 'sample'"),
        ("warmup(ramp='ratio)", SpecError, "this ' is never closed"),
        ("topk & ef", SpecError, "joined by '|', not by '&'\n    topk & ef\n         ^"),
        ("topk, ef", SpecError, "joined by '|', not by ','"),
        ("int8 | int8", SpecError, "nothing can be chained behind int8: it sends no float32"),
        ("topk | int8 | int4", SpecError, "    topk | int8 | int4\n                  ^"),
        ("lossless | int8", SpecError, "nothing can be chained behind lossless"),
        ("block_topk(bits=16) | int8", SpecError, "nothing can be chained"),
        ("topk(ratio=0.1, ratio=0.2)", SpecError, "'ratio' is given twice"),
        ("1 + 2", SpecError, "joined by '|', not by '+'"),
        ("[1]", SpecError, "expected a compressor"),
        ("my.plug.Int6(x=1) | ef", SpecError, "MODULE:NAME: write 'my.plug:Int6'\n    my.plug"),
        ("plug.py", SpecError, "a class in a module is MODULE:NAME, such as 'plug:Name'"),
        ("topk(ratio=open('x'))", SpecError, "an option's value is a number"),
        ("topk(**{})", SpecError, "** is not possible here"),
        ("fp16 | int8", SpecError, "summed on the wire"),
        ("", SpecError, "write 'none'"),
        ("None", SpecError, "write 'none' for no compression"),
        ("'topk'", SpecError, "leave the quotes away: topk"),
        ("()", SpecError, "expected a compressor"),
        (
            "topk(ratio=10%)",
            SpecError,
            "not a percentage; write 0.1\n    topk(ratio=10%)\n    " + 13 * " " + "^",
        ),
        ("topk:0.01", SpecError, "options stand in brackets, as in 'topk(ratio=0.01)'"),
        ("topk ratio=0.01", SpecError, "options stand in brackets, as in 'topk(ratio=0.01)'"),
        ("topk(ratio: 0.01)", SpecError, "an option is written as in 'ratio=0.01'"),
        ("topk > ef", SpecError, "joined by '|', not by '>'"),
        ("ef | topk", SpecError, "modifies what stands to its left: ef | topk; write 'topk | ef'"),
        ("block-topk", SpecError, "not by '-'; a name has '_' in it, as 'block_topk' has"),
        (
            "topk(ratio=0,01)",
            SpecError,
            "a number is written with a point, and ',' is between options: 0.01\n"
            "    topk(ratio=0,01)\n               ^",
        ),
        ("fp32", UnknownCompressor, "did you mean 'none'?"),
        ("adasum", UnknownCompressor, "that is an operation, op=hvd.Adasum, and no compressor."),
        ("Half", UnknownCompressor, "did you mean 'fp16'?"),
        ("error_feedback", UnknownCompressor, "did you mean 'ef'?"),
        ("natural_compression", UnknownCompressor, "did you mean 'natural'?"),
        ("efsignsgd", UnknownCompressor, "did you mean 'onebit | ef'?"),
        (
            "fp16|" * 390 + "ef",
            SpecError,
            "391 compressors joined by '|', and may have 32; shorten",
        ),
        (
            "-" * 20_000,
            SpecError,
            "it has 20000 characters, and may have 2000; shorten it: it begins",
        ),
        ("~" * 1990 + "int8", SpecError, "expected a compressor"),
        ("plug." * 390 + "Int6", SpecError, "plug.plug:Int6'"),
        ("plug" + "()" * 990, SpecError, "expected a compressor"),
    ],
    ids=lambda value: value[:24] if isinstance(value, str) else value.__name__,
)
def test_a_bad_spec_says_what_and_where(spec, kind, says):
    with pytest.raises(kind) as caught:
        parse(spec)
    assert says in str(caught.value)
    assert isinstance(caught.value, ValueError)
    trace = "".join(traceback.format_exception(caught.value))
    assert trace.count("Traceback") == 1, "one mistake is told once"


def test_the_longest_specs_are_read():
    assert str(parse("ef" + " | ef" * (MOST - 1))).count("ef") == MOST
    assert parse("int8(bucket=64," + " " * (LONGEST - 16) + ")") == Int8(bucket=64)


def test_nothing_in_a_spec_is_executed(tmp_path):
    victim = tmp_path / "touched"
    with pytest.raises(CompressorError):
        parse(f"topk(ratio=__import__('pathlib').Path({str(victim)!r}).touch())")
    assert not victim.exists()


@given(st.text(max_size=30))
def test_any_text_either_parses_or_is_refused_politely(text):
    with contextlib.suppress(CompressorError):
        parse(text)


def test_a_lone_modifier_cannot_compress():
    with pytest.raises(SpecError, match=r"write for example 'int8 \| ef'"):
        resolve("ef")
    with pytest.raises(CompressorError):
        resolve("topk | (ef | ef)").validate() or parse("ef").traits()


def test_routes_take_the_first_match():
    route = Router({"*.bias": "none", "embed*": "fp16", "*": "int8 | ef"})
    assert route("fc.bias") == NoCompression()
    assert route("embedding.weight") == FP16()
    assert route("fc.weight") == Int8() | ErrorFeedback()
    assert Router({"a": "fp16"})("b") == NoCompression()
    with pytest.raises(UnknownCompressor):
        Router({"*": "nope"})


def test_a_mapping_of_options_is_told_what_a_mapping_is():
    """As GRACE takes them, say."""
    with pytest.raises(
        SpecError, match=r"route .ratio. leads to 0\.01, which is no spec: a mapping"
    ):
        Router({"compressor": "topk", "ratio": 0.01})
    with pytest.raises(UnknownCompressor) as told:
        Router({"compressor": "topk", "memory": "residual"})
    (note,) = told.value.__notes__
    assert note.startswith("That is where the route 'memory' leads: a mapping goes from patterns")


PLACE = "ringlet.compressors.testing.tools.simulate"  # a module that registers nothing


def test_a_class_that_nobody_registered_is_named_by_its_place(tmp_path, monkeypatch):
    (tmp_path / "unregistered_plugin.py").write_text(
        "from ringlet.compressors import Compressor\n"
        "class Mine(Compressor):\n"
        "    level: int = 3\n"
        "    where: str = 'a:b.c'\n"
        "    class Inner(Compressor):\n"
        "        pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    spec = "unregistered_plugin:Mine(level=4, where='x:y') | ef"
    found = parse(spec)
    assert str(found) == spec
    assert parse(str(found)) == found
    assert (found.inner.level, found.inner.where) == (4, "x:y")
    assert parse("unregistered_plugin:Mine") == type(found.inner)()
    assert parse("topk | unregistered_plugin:Mine.Inner").second.label() == "Inner"
    assert Router({"*.bias": "none", "*": spec})("w") == found


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("no_such_module_here:X | ef", "no_such_module_here does not import: ModuleNotFoundError"),
        ("mine::Mine | ef", "with one ':': write 'mine:Mine'"),
        ("mine:Mine:Inner", "with one ':': write 'mine:Mine.Inner'"),
        ("ringlet.compressors:Compressor", "the class that compressors are derived from"),
        ("no_such_package.module:X", "put the folder that it is in into PYTHONPATH"),
        (f"{__name__}:AN_INSTANCE", "that is Int8(), which is no class; write its class and opt"),
        (f"{__name__}:a_function", "that is a function, not a class derived from"),
        (f"{PLACE}:Nothing", f"{PLACE} has no compressor 'Nothing'"),
        (f"int8 | {PLACE}:simulate", "not a class derived from"),
        ("int8 json:X", "a '|' is missing before 'json:X'"),
        ("ringlet.compressors:TopKk | ef", "did you mean 'TopK'?"),
        ("ringlet.compressors:Topk", "did you mean 'TopK'?"),
        ("/here/mine.py:Sign | ef", "'mine:Sign'"),
        ("/here/mine.py:Sign | ef", "with /here in PYTHONPATH"),
        ("int8 | mine.py:Sign", "'mine:Sign'"),
        ("../here/mine.py:Sign(scale=2)", "'mine:Sign'"),
        (r"C:\\here\\mine.py:Sign", "'mine:Sign'"),
        ("here/mine:Sign", "'mine:Sign'"),
        (f"{PLACE}:Workspace.array.x", "has no compressor 'Workspace.array.x'"),
        (f"{PLACE}:__doc__.x", "has no compressor '__doc__.x'"),
        ("no_such_plugin_here", "MODULE:NAME"),
    ],
)
def test_a_place_without_a_compressor_is_pointed_at(spec, says):
    with pytest.raises(CompressorError) as caught:
        parse(spec)
    message = str(caught.value)
    assert says in message
    text, caret = message.splitlines()[-2:]
    assert text.strip() == spec
    assert text[caret.index("^") :].startswith(spec.split(" ")[-1 if "int8" in spec else 0])


def test_a_module_that_ends_the_process_is_told_of(tmp_path, monkeypatch):
    (tmp_path / "ends_here.py").write_text("import sys\nsys.exit('no licence')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(CompressorError, match="ends_here does not import: SystemExit: no licence"):
        resolve("ends_here:Mine")


def test_a_module_that_does_not_import_says_in_which_line(tmp_path, monkeypatch):
    (tmp_path / "asks_more.py").write_text("import math\nimport no_such_module_here\n")
    monkeypatch.syspath_prepend(tmp_path)
    says = r"module_here' \(asks_more\.py, line 2: import no_such_module_here\)"
    with pytest.raises(CompressorError, match=says):
        resolve("asks_more:Mine")


class Abstract(Compressor, metaclass=abc.ABCMeta):
    @abc.abstractmethod
    def steps(self): ...


class Refuses(Compressor):
    def validate(self):
        raise RuntimeError("no licence")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Abstract", "cannot be made: TypeError: .* abstract method '?steps"),
        ("Refuses", r"RuntimeError: no licence \(test_spec\.py, line \d+: raise RuntimeError"),
    ],
)
def test_a_class_that_cannot_be_made_is_pointed_at(name, says):
    with pytest.raises(CompressorError, match=says) as caught:
        resolve(f"{__name__}:{name} | ef")
    assert str(caught.value).endswith(f"\n    {__name__}:{name} | ef\n    ^")


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (f"{PLACE} : Context", f"with one ':': write '{PLACE}:Context'"),
        (f"int8 | {PLACE}: Context", f"with one ':': write '{PLACE}:Context'"),
        ("mine:", "a name is missing behind this ':'"),
        ("ef(int8)", "a compressor stands before or behind another: 'int8 | ef'"),
        ("mxfp8(format=e5m2)", "a string has quotes: write 'e5m2'"),
        ("mxfp8(stochastic=true)", "True, False or None; write True"),
    ],
)
def test_what_cannot_be_read_says_how_it_is_written(spec, says):
    with pytest.raises(SpecError) as caught:
        parse(spec)
    assert says in str(caught.value)


def test_an_option_that_no_spec_could_be_read_from_is_refused():
    with pytest.raises(CompressorError, match="momentum_correction: clip must be finite, got inf"):
        parse("none | momentum_correction(clip=1e999)")


class Unbounded(Compressor):
    clip: float = float("inf")


def test_a_default_that_is_infinite_need_not_be_written():
    assert str(Unbounded()).endswith("Unbounded")

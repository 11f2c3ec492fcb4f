"""Random numbers of a context: what they depend on, and whose arrays they are."""

import dataclasses
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringlet.compressors import Context
from ringlet.compressors.core.context import KeysByStep

CTX = Context(name="w", shape=(1000,), numel=1000, step=3, rank=1, size=4, seed=7)


class Elsewhere(np.ndarray):
    """An array of another module."""


elsewhere = types.ModuleType("elsewhere")
elsewhere.__dict__.update(vars(np))
elsewhere.asarray = lambda values: np.asarray(values).view(Elsewhere)
elsewhere.arange = lambda *args, **kwargs: np.arange(*args, **kwargs).view(Elsewhere)


def changed(**fields):
    return dataclasses.replace(CTX, **fields)


def test_pieces_draw_what_the_whole_tensor_draws_there():
    whole = CTX.uniform(1000)
    pieces = [changed(offset=start).uniform(250) for start in range(0, 1000, 250)]
    assert np.array_equal(np.concatenate(pieces), whole)
    assert whole.dtype == np.float32
    assert whole.min() >= 0
    assert whole.max() < 1
    assert abs(float(whole.mean()) - 0.5) < 0.05


@pytest.mark.parametrize("other", [{"step": 4}, {"seed": 8}, {"name": "v"}, {"stage": 2}])
@pytest.mark.parametrize("shared", [False, True])
def test_numbers_change_with_what_they_depend_on(other, shared):
    assert not np.array_equal(changed(**other).uniform(50, shared), CTX.uniform(50, shared))
    drawn = [ctx.rng(shared).random(50) for ctx in (CTX, changed(**other))]
    assert not np.array_equal(*drawn)


@given(st.lists(st.builds(
    Context, name=st.text(max_size=9), step=st.integers(0, 2**40), stage=st.sampled_from([1, 2]),
    rank=st.integers(0, 2**20), seed=st.integers(0, 2**63),
), max_size=9))  # fmt: skip
def test_keys_of_many_contexts_are_those_of_each(contexts):
    keys = KeysByStep(contexts)
    for later in (0, 1, 1000):
        found = keys.at([ctx.step + later for ctx in contexts])
        assert found.dtype == np.uint64
        for key, ctx in zip(found, contexts, strict=True):
            assert int(key) == dataclasses.replace(ctx, step=ctx.step + later).key()


def test_ranks_have_shared_numbers_in_common_and_no_others():
    other = changed(rank=2)
    assert np.array_equal(other.uniform(50, shared=True), CTX.uniform(50, shared=True))
    assert np.array_equal(other.rng(shared=True).random(50), CTX.rng(shared=True).random(50))
    assert not np.array_equal(other.uniform(50), CTX.uniform(50))
    assert not np.array_equal(other.rng().random(50), CTX.rng().random(50))


def test_numbers_are_arrays_of_the_contexts_module():
    ctx = changed(xp=elsewhere)
    for draw in (
        lambda rng: rng.random(50, dtype=np.float32),
        lambda rng: rng.integers(0, 9, (5, 10)),
        lambda rng: rng.permutation(50),
    ):
        there, here = draw(ctx.rng()), draw(CTX.rng())
        assert isinstance(there, Elsewhere)
        assert np.array_equal(there, here)
    assert isinstance(ctx.uniform(50), Elsewhere)
    assert isinstance(ctx.rng().random(), float)
    assert not np.array_equal(ctx.rng(stream=1).random(50), ctx.rng().random(50))
    rng = ctx.rng()
    assert not np.array_equal(rng.random(50), rng.random(50))

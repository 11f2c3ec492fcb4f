"""Checks of one call: nothing hidden, nothing aliased, nothing left to chance."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from ringlet.compressors import pool
from ringlet.compressors.context import Array, Context
from ringlet.compressors.contract import Compressor, Payload
from ringlet.compressors.payload import check_payload, deserialise, serialise, serialised_size
from ringlet.compressors.spec import parse
from ringlet.compressors.testing.runner import for_all
from ringlet.compressors.testing.simulate import context, decode, encode, simulate
from ringlet.compressors.testing.vectors import LENGTHS, gaussian, small, vectors


def same(a: Array, b: Array) -> bool:
    """Whether two arrays are equal bit for bit, any NaN being as good as another."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return bool(np.array_equal(a, b, equal_nan=a.dtype.kind == "f"))


def same_payload(a: Payload, b: Payload) -> bool:
    """Whether two payloads hold the same arrays."""
    return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)


def by_payload(compressor: Compressor) -> bool:
    """Whether there are payloads: not for compressors that exchange in rounds."""
    return compressor.traits().combine != "rounds"


def check_is_a_value(compressor: Compressor) -> None:
    """Ranks compare compressors by their text, and checkpoints and workers carry copies of them:
    equal options must mean an equal value, everywhere.
    """
    copy = pickle.loads(pickle.dumps(compressor))
    assert copy == compressor, "a pickled copy is not equal to the original"
    assert hash(copy) == hash(compressor), "equal compressors have different hashes"
    assert str(copy) == str(compressor), "equal compressors have different specs"
    if compressor.spec_name:
        text = str(compressor)
        assert parse(text) == compressor, f"parse({text!r}) is {parse(text)!r}"
    before = dict(vars(compressor))
    simulate(compressor, [gaussian(2000, 0)])
    assert vars(compressor) == before, "compressing changed the compressor itself"


def check_leaves_its_input_alone(compressor: Compressor) -> None:
    """The input is the framework's gradient: whoever changes it changes the training, and a payload
    that is a view of it changes while it waits to be sent.
    """

    def body(x: Array) -> None:
        if not by_payload(compressor):
            return
        before = x.copy()
        ctx = context(x)
        payload = compressor.compress(x, ctx)
        encode(compressor, x, context(x))
        assert same(x, before), "the input was modified"
        for name, array in payload.items():
            scratch = ctx.workspace.lends(array)
            assert not scratch, f"payload array {name!r} is scratch of ctx.workspace; copy it"
            aliased = array.size and np.shares_memory(array, x)
            assert not aliased, f"payload array {name!r} shares memory with the input; copy it"

    for_all(vectors(), body)


def check_payload_travels(compressor: Compressor) -> None:
    """What is returned is what travels: flat arrays of plain dtypes, equal after the journey."""

    def body(x: Array) -> None:
        if not by_payload(compressor):
            return
        payload = compressor.compress(x, context(x))
        check_payload(compressor.label(), payload)
        buffer = np.empty(serialised_size(payload), np.uint8)
        serialise(payload, buffer)
        received = deserialise(buffer)
        assert same_payload(received, payload), "the payload is not the same after the journey"
        n = x.size
        here, there = (decode(compressor, p, n, context(x)) for p in (payload, received))
        assert same(here, there), "the received payload decodes to something else"

    for_all(vectors(), body)


def check_fills_its_output(compressor: Compressor) -> None:
    """Output arrays are reused: an element that is not written keeps a gradient of another step."""

    def body(x: Array) -> None:
        if not by_payload(compressor):
            return
        payload = encode(compressor, x, context(x))
        first, second = np.full(x.size, np.nan, np.float32), np.ones(x.size, np.float32)
        for out in (first, second):
            compressor.decompress(payload, out, context(x))
        assert same(first, second), "some elements of out are not overwritten"

    for_all(vectors(), body)


def check_every_length(compressor: Compressor) -> None:
    """Biases have one element, shards can be empty, and few layers are a multiple of anything."""
    for n in LENGTHS:
        x = gaussian(n, n)
        (out,) = simulate(compressor, [x])
        assert out.shape == (n,), f"{n} elements became {out.shape}"
        assert np.isfinite(out).all(), f"{n} finite elements decode to {out}"


def check_deterministic(compressor: Compressor) -> None:
    """A run must be reproducible from its seed: random numbers come from ctx.rng(), and nothing is
    remembered anywhere but in ctx.state.
    """
    x, other = gaussian(3000, 1), gaussian(500, 2)

    def result(noise: int) -> list[Array]:
        np.random.seed(noise)  # what a plugin might use by mistake
        simulate(compressor, [other * noise], step=noise, name="another")
        states: list[dict[str, Any]] = [{}, {}]
        steps = [simulate(compressor, [x, -2 * x], states, step) for step in range(3)]
        return [out for outs in steps for out in outs]

    first, second = result(1), result(2)
    assert all(map(same, first, second)), (
        "the same gradients, states and steps gave different results"
    )


def check_fast_paths_agree(compressor: Compressor) -> None:
    """Overrides are for speed: the engine uses whichever fits; results must not show which."""

    def body(x: Array) -> None:
        if not by_payload(compressor):
            return
        reference = compressor.compress(x, context(x))
        payload = encode(compressor, x, context(x))
        assert same_payload(payload, reference), "encode_into and compress give different payloads"
        decoded = decode(compressor, payload, x.size, context(x))
        total = np.ones(x.size, np.float32)
        compressor.accumulate(payload, total, context(x))
        with np.errstate(all="ignore"):
            expected = decoded + np.float32(1)
        assert np.allclose(total, expected, 1e-6, 1e-6, equal_nan=True), (
            "accumulate is not decompress and add"
        )
        compressor.sum_into([payload, payload], total, context(x))
        with np.errstate(all="ignore"):
            assert np.allclose(total, decoded + decoded, 1e-6, 1e-6, equal_nan=True), (
                "sum_into is not the sum of the decoded"
            )

    for_all(vectors(), body)


def check_threads_change_nothing(compressor: Compressor) -> None:
    """Ranks may have different numbers of cores, and must still agree bit for bit."""
    n = 5 * pool.MIN_ELEMENTS // 2
    x = gaussian(n, 3)
    results = []
    for threads in (1, 4):
        with pool.limited(threads):
            results.append(simulate(compressor, [x])[0])
    assert same(*results), "one thread and four threads give different results"


def check_non_finite_stays_visible(compressor: Compressor) -> None:
    """Loss scaling finds overflow by looking at reduced gradients: a codec that turns Inf or NaN
    into an ordinary number hides it, and the step that should be skipped is taken.
    """
    for bad in (np.nan, np.inf, -np.inf):
        for n, place in ((1, 0), (70, 69), (3000, 1234)):
            x = gaussian(n, 4)
            x[place] = bad
            with np.errstate(all="ignore"):
                (out,) = simulate(compressor, [x])
            assert not np.isfinite(out).all(), f"{bad} at element {place} of {n} vanished"


def check_extreme_values(compressor: Compressor) -> None:
    """Gradients are zero, tiny and huge at times; finite numbers must not turn into NaN, and zeros
    must not turn into garbage.
    """

    def body(x: Array) -> None:
        with np.errstate(all="ignore"):
            (out,) = simulate(compressor, [x])
        if np.isfinite(x).all() and (np.abs(x) < 2.0**15).all():
            assert np.isfinite(out).all(), f"finite values decode to {out}"

    for_all(small(allow_special=True), body)


def check_decoding_is_the_same_everywhere(compressor: Compressor) -> None:
    """Every rank decodes everybody's payloads: if the result depended on the rank that decodes or
    on what it remembers, replicas would drift apart.
    """
    if not by_payload(compressor):
        return
    x = gaussian(3000, 5)
    state: dict[str, Any] = {}
    for step in range(3):
        payload = encode(compressor, x, context(x, state, rank=1, size=4, step=step))
        outs = [
            decode(compressor, payload, x.size, Context(**_on(rank, x, held), step=step))
            for rank, held in ((1, state), (0, {}), (3, {}))
        ]
        assert same(outs[0], outs[1]), "another rank decodes the payload to something else"
        assert same(outs[1], outs[2]), "another rank decodes the payload to something else"


def _on(rank: int, x: Array, state: dict[str, Any]) -> dict[str, Any]:
    fields = {"name": "tensor", "shape": x.shape, "numel": x.size}
    return {**fields, "state": state, "rank": rank, "size": 4}


CHECKS = (
    check_is_a_value,
    check_leaves_its_input_alone,
    check_payload_travels,
    check_fills_its_output,
    check_every_length,
    check_deterministic,
    check_fast_paths_agree,
    check_threads_change_nothing,
    check_non_finite_stays_visible,
    check_extreme_values,
    check_decoding_is_the_same_everywhere,
)

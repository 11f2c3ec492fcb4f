"""Checks of declared traits: the engine believes them, so they have to be true."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from ringlet.compressors.context import Array, Context, State
from ringlet.compressors.contract import Compressor, Traits, storage
from ringlet.compressors.states import rescale
from ringlet.compressors.testing.basics import by_payload, same, same_payload
from ringlet.compressors.testing.runner import for_all
from ringlet.compressors.testing.simulate import context, decode, encode, simulate
from ringlet.compressors.testing.vectors import gaussian, heavy_tailed, vectors

_DRAWS = 400
_SCALE = 64.0  # by which a loss scale changes


def check_traits_are_traits(compressor: Compressor) -> None:
    """The engine chooses collectives by the traits; nonsense there breaks far from its cause."""
    traits = compressor.traits()
    assert isinstance(traits, Traits), f"traits() returned {traits!r}"
    assert traits == compressor.traits(), "traits() gives something else every time"
    assert traits.combine in ("sum", "gather", "rounds"), f"combine is {traits.combine!r}"
    granule = traits.granularity
    assert granule is None or (isinstance(granule, int) and granule > 0), (
        f"granularity must be a number of elements, not {granule!r}"
    )
    assert isinstance(traits.min_size, int), f"min_size must be a number, not {traits.min_size!r}"
    assert traits.min_size >= 0, "min_size is negative"
    assert traits.delta is None or 0 < traits.delta <= 1, f"delta is {traits.delta}"
    assert traits.omega is None or traits.omega >= 0, f"omega is {traits.omega}"


def check_fixed_size(compressor: Compressor) -> None:
    """Buffers of fixed-size payloads are laid out before anything is compressed: an array of
    another length or dtype would overwrite its neighbour's bytes.
    """
    traits = compressor.traits()
    if not traits.fixed_size or not by_payload(compressor):
        return

    def body(x: Array) -> None:
        layout = compressor.layout(x.size)
        assert layout == compressor.layout(x.size), "layout(n) gives something else every time"
        payload = compressor.compress(x, context(x))
        names = [part.name for part in layout]
        assert sorted(payload) == sorted(names), (
            f"compress returns {sorted(payload)}, layout says {sorted(names)}"
        )
        for name, dtype, elements in layout:
            array = payload[name]
            fits = array.dtype == storage(dtype) and array.size == elements
            found = f"{array.dtype}[{array.size}], layout says {dtype}[{elements}]"
            assert fits, f"compress returns {name!r} as {found} for n={x.size}"

    for_all(vectors(), body)


def check_granularity(compressor: Compressor) -> None:
    """Scatter-reduce compresses shards: pieces cut at the granularity must give what the whole
    tensor's payload has there, or results would depend on the number of ranks.
    """
    granule = compressor.traits().granularity
    if granule is None or not by_payload(compressor):
        return
    for n in (0, 1, granule, 3 * granule + 1, 5 * granule):
        x = heavy_tailed(n, n)
        whole = decode(compressor, encode(compressor, x, _piece(x, 0, n)), n, _piece(x, 0, n))
        for cut in (0, granule, 2 * granule):
            if cut > n:
                continue
            pieces = []
            for start, stop in ((0, cut), (cut, n)):
                ctx = _piece(x, start, n)
                payload = encode(compressor, x[start:stop].copy(), ctx)
                pieces.append(decode(compressor, payload, stop - start, _piece(x, start, n)))
            assert same(np.concatenate(pieces), whole), (
                f"{n} elements cut at {cut} decode to something else than the whole"
            )


def check_sums_on_the_wire(compressor: Compressor) -> None:
    """combine="sum" lets the network add payloads: decoding must carry over to the sum."""
    if compressor.traits().combine != "sum":
        return
    layout = compressor.layout(100)
    assert len(layout) == 1, f"a payload that is summed is one array, not {len(layout)}"
    for size in (2, 3, 5):
        gradients = [gaussian(2000, seed) for seed in range(size)]
        parts = [simulate(compressor, [x])[0].astype(np.float64) for x in gradients]
        (mean,) = {simulate(compressor, gradients)[r].tobytes() for r in range(size)}
        got, expected = np.frombuffer(mean, np.float32), np.mean(parts, axis=0)
        largest = max(float(np.abs(part).max()) for part in parts)
        close = np.allclose(got, expected, rtol=0.02, atol=0.02 * largest)
        assert close, f"decoding the sum of {size} payloads is not the sum of the decoded"


def check_unbiased(compressor: Compressor) -> None:
    """omega promises E C(x) = x and E||C(x) - x||^2 <= omega ||x||^2: convergence proofs, and the
    choice of a learning rate, rest on both.
    """
    omega = compressor.traits().omega
    if omega is None or not by_payload(compressor):
        return
    for x in (gaussian(1500, 7), heavy_tailed(1500, 8), np.ones(1500, np.float32)):
        energy = float(np.square(x, dtype=np.float64).sum())
        total, spread = np.zeros(x.size), 0.0
        for step in range(_DRAWS):
            drawn = _draw(compressor, x, step)
            total += drawn
            spread += float(np.square(drawn - x).sum()) / _DRAWS
        assert spread <= omega * energy * 1.1 + 1e-9 * energy, (
            f"E||C(x) - x||^2 is {spread / energy:.4g} ||x||^2, declared are {omega:.4g}"
        )
        # The mean of T draws is off by spread / T in square, if there is no bias.
        off = float(np.square(total / _DRAWS - x).sum())
        assert off <= 4 * spread / _DRAWS + 1e-9 * energy, (
            f"the mean of {_DRAWS} draws is off by {np.sqrt(off / energy):.3g} ||x||, noise "
            f"explains {np.sqrt(spread / _DRAWS / energy):.3g}: it is biased"
        )


def check_contraction(compressor: Compressor) -> None:
    """delta promises E||C(x) - x||^2 <= (1 - delta) ||x||^2: without it error feedback may
    diverge.
    """
    delta = compressor.traits().delta
    if delta is None or not by_payload(compressor):
        return

    def body(x: Array) -> None:
        energy = float(np.square(x, dtype=np.float64).sum())
        if not 1e-20 < energy < 1e30:
            return
        lost = [float(np.square(_draw(compressor, x, s) - x).sum()) / energy for s in range(12)]
        error = 6 * float(np.std(lost)) / np.sqrt(len(lost))
        mean = float(np.mean(lost))
        assert mean - error <= (1 - delta) + 1e-5, (
            f"||C(x) - x||^2 is {mean:.4g} ||x||^2, declared are at most {1 - delta:.4g}"
        )

    for_all(vectors(), body)


def check_memory_is_declared(compressor: Compressor) -> None:
    """A compressor that remembers needs a name for its tensor and a place in the checkpoint: the
    engine asks for them only where ``stateful`` says so.
    """
    if compressor.traits().stateful or not by_payload(compressor):
        return
    state: dict[str, Any] = {}
    x = gaussian(2000, 9)
    for step in range(3):
        remembering = encode(compressor, x, context(x, state, step=step))
        fresh = encode(compressor, x, context(x, step=step))
        assert same_payload(remembering, fresh), (
            "the result depends on earlier steps, but traits() does not say stateful=True"
        )


def check_gradient_units(compressor: Compressor) -> None:
    """A loss scale that changes multiplies gradients, and with them what gradient_units names in
    ctx.state: whatever else is in their units would be added to gradients of another size.
    """
    traits = compressor.traits()
    units = traits.gradient_units
    named = isinstance(units, tuple) and all(isinstance(name, str) for name in units)
    assert named, f"gradient_units is a tuple of names in ctx.state, not {units!r}"
    assert traits.stateful or not units, "gradient_units names a state, stateful says there is none"
    if not traits.stateful or not traits.scales:
        return
    for shape in ((40, 50), (2000,)):
        given: dict[str, Any] = {"name": str(shape), "shape": shape}
        states: list[State] = [{}, {}]
        for step in range(3):
            gradients = [gaussian(2000, 2 * step), gaussian(2000, 2 * step + 1)]
            simulate(compressor, gradients, states, step=step, **given)
        for name in states[0].keys() & set(units):
            lengths = np.shape(states[0][name])
            assert lengths in ((), (2000,)), (
                f"of a tensor of 2000 elements ctx.state[{name!r}] is an array of shape "
                f"{list(lengths)}: what gradient_units names is a flat array of as many elements "
                "as the tensor, or a number, for a checkpoint's is forgotten where it is not"
            )
        scaled = copy.deepcopy(states)
        for state in scaled:
            rescale(state, compressor, _SCALE)
        gradients = [gaussian(2000, 7), gaussian(2000, 8)]
        larger = [x * np.float32(_SCALE) for x in gradients]
        expected = simulate(compressor, gradients, states, step=3, **given)[0] * _SCALE
        got = simulate(compressor, larger, scaled, step=3, **given)[0]
        off = float(np.abs(got - expected).max() / np.abs(expected).max())
        assert off < 1e-3, (
            f"gradients {_SCALE:.0f} times as large give a result that is off by {off:.2g} of the "
            f"largest, though {list(units)} of {_names(states[0])} were multiplied as well: name "
            "in gradient_units what is in units of the gradient, and nothing else"
        )


def check_results_may_replace_values(compressor: Compressor) -> None:
    """in_place=True lets the engine give ``exchange`` one array as ``x`` and as ``out``: what looks
    at ``x`` after it has written to ``out`` would then see something else.
    """
    traits = compressor.traits()
    if traits.combine != "rounds" or not traits.in_place:
        return
    states: list[list[dict[str, Any]]] = [[{}, {}], [{}, {}]]
    for shape in ((40, 50), (2000,)):
        for step in range(3):
            gradients = [gaussian(2000, 2 * step), gaussian(2000, 2 * step + 1)]
            given: dict[str, Any] = {"step": step, "name": str(shape), "shape": shape}
            apart = simulate(compressor, gradients, states[0], **given)
            within = simulate(compressor, gradients, states[1], **given, in_place=True)
            assert same(apart[0], within[0]), (
                f"step {step} of shape {shape} gives another result if out is x itself, but "
                "traits() says in_place=True"
            )
        states = [[{}, {}], [{}, {}]]


def _names(state: State) -> list[str]:
    inner = [name for value in state.values() if isinstance(value, dict) for name in _names(value)]
    return sorted([name for name, value in state.items() if not isinstance(value, dict)] + inner)


def _piece(x: Array, offset: int, n: int) -> Context:
    return Context(shape=(n,), numel=n, offset=offset, step=3)


def _draw(compressor: Compressor, x: Array, step: int) -> Array:
    payload = encode(compressor, x, context(x, step=step))
    return decode(compressor, payload, x.size, context(x, step=step)).astype(np.float64)


CHECKS = (
    check_traits_are_traits,
    check_fixed_size,
    check_granularity,
    check_sums_on_the_wire,
    check_unbiased,
    check_contraction,
    check_memory_is_declared,
    check_gradient_units,
    check_results_may_replace_values,
)

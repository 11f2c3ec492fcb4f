"""Residuals of error feedback in less memory than float32: how a tensor's state holds them.

A state holds one of ``residual`` (float32), ``residual_bf16`` (the bits, int16), or
``residual_int8`` with ``residual_scales`` (bfloat16 bits, int16, one per 128 elements).

The latter are rounded at random, without bias (Gupta et al., "Deep learning with limited numerical
precision", ICML 2015). To the nearest, a residual would not grow beyond 512 times what a step adds.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ringlet.compressors.base import norms
from ringlet.compressors.base.batched import RowMemory
from ringlet.compressors.base.bucketed import Bucketed, Kernel, widened
from ringlet.compressors.base.composed_batches import Widening
from ringlet.compressors.base.contract import Part, Payload, Traits, storage
from ringlet.compressors.core.context import Array, Context, State, Workspace
from ringlet.compressors.core.errors import CompressorError
from ringlet.compressors.core.remembered import described
from ringlet.compressors.core.rng import squares

if TYPE_CHECKING:
    from ringlet.compressors.kernels.cuda.common.bucketed import BucketedCodec

_AT_ONCE = 1024  # elements that a warp casts on a GPU
_TINY = np.float32(1.5e-36)
_HIGHEST16, _HIGHEST_SCALE = 0x7F7F, 0x7BFF  # as in kernels.cpu.modifiers.residuals
_STREAM = 0x2545F4914F6CDD1C  # as there


class Store(Bucketed):
    """Base of what residuals are kept as: a codec that never travels.

    ``held`` names the state's arrays: by the payload's array, their key and dtype.
    """

    held: ClassVar[dict[str, tuple[str, str]]] = {}

    def traits(self) -> Traits:
        """Cut at blocks."""
        return Traits(fixed_size=True, granularity=self.granule)

    def arrays(self, n: int, ctx: Context) -> Payload:
        """Return the pieces of the state's arrays for ``n`` elements from ``ctx.offset`` on.

        Zeros at the first step. What is held in another dtype is converted. Raises CompressorError
        where something else is remembered.
        """
        state, numel = ctx.state, max(ctx.numel, n)
        if any(key not in state for key, _ in self.held.values()):
            self._begin(numel, ctx)
        if ctx.offset % self.granule:
            raise CompressorError(
                f"a residual in blocks of {self.granule} elements cannot be cut at {ctx.offset}"
            )
        found: Payload = {}
        counts = {part.name: part.elements for part in self.layout(n)}
        for name, bits, elements in self.layout(numel):
            key, dtype = self.held[name]
            held = state[key]
            if getattr(held, "dtype", None) != dtype or held.shape != (elements,):
                raise _strange(key, state[key], f"{dtype}[{elements}]", ctx)
            first = ctx.offset // self.granule * self.strides()[name]
            piece = state[key][first : first + counts[name]]
            found[name] = piece.view(storage(bits))
        return found

    def memories(self, of: Callable[[str, int, Context], Array | None]) -> tuple[RowMemory, ...]:
        """Return what rows of many tensors tell; ``of(name, n, ctx)`` returns a payload's array."""
        return tuple(
            RowMemory(partial(of, name), (key,), np.dtype(dtype).itemsize, self.granule // step)
            for (name, (key, dtype)), step in zip(
                self.held.items(), self.strides().values(), strict=True
            )
        )

    @abstractmethod
    def widening(self) -> tuple[Widening, Widening]:
        """Return kernels for many tensors in host memory: to widen residuals, and to round them."""

    def drawn(self, n: int, ctx: Context) -> Array:
        """Return 16 random bits (uint32) for each element from ``ctx.offset`` on."""
        found: Array = squares(ctx.xp, ctx.key() ^ _STREAM, ctx.offset, n) >> 16
        return found

    def _begin(self, numel: int, ctx: Context) -> None:
        """Begin with zeros, or with what is held in another dtype."""
        known = wide(ctx.state)
        if known is not None:
            check(known, numel, ctx)
        forget(ctx.state)
        whole: Payload = {}
        for name, dtype, elements in self.layout(numel):
            key, kept = self.held[name]
            ctx.state[key] = ctx.xp.zeros(elements, kept)
            whole[name] = ctx.state[key].view(storage(dtype))
        if known is not None:
            self.encode_into(known, whole, ctx)


class Store16(Store):
    """bfloat16, rounded at random, at most to the largest finite one."""

    held: ClassVar[dict[str, tuple[str, str]]] = {"values": ("residual_bf16", "int16")}

    def layout(self, n: int) -> tuple[Part, ...]:
        """n values of 16 bits."""
        return (Part("values", "bfloat16", n),)

    @property
    def granule(self) -> int:
        """Every value is rounded by itself."""
        return 1

    def strides(self) -> dict[str, int]:
        """A value."""
        return {"values": 1}

    def compress(self, x: Array, ctx: Context) -> Payload:
        """Round the finite ``x``."""
        bits = x.view("uint32")
        near = (bits & 0x7FFFFFFF) + self.drawn(x.size, ctx)
        most = ctx.xp.minimum(near >> 16, _HIGHEST16)
        return {"values": (most | ((bits >> 16) & 0x8000)).astype("uint16")}

    def decode_array(self, payload: Payload, out: Array, ctx: Context) -> None:
        """Widen: bfloat16 is the upper half of a float32."""
        out[...] = widened(payload["values"])

    def encoder(self, feedback: bool, ctx: Context) -> Kernel:
        """The kernel."""
        from ringlet.compressors.kernels.cpu.modifiers.residuals import narrow16

        return lambda x, held, decay, key, start, values: narrow16(x, key, start, values)

    def decoder(self, add: bool, ctx: Context) -> Kernel:
        """The kernel."""
        from ringlet.compressors.kernels.cpu.modifiers.residuals import widen16

        kernel: Kernel = widen16(add)
        return kernel

    def cuda(self) -> BucketedCodec:
        """The kernels."""
        from ringlet.compressors.kernels.cuda.common.bucketed import BucketedCodec

        return BucketedCodec("modifiers/residuals", 16, _AT_ONCE, random=True)

    def widening(self) -> tuple[Widening, Widening]:
        """The kernels."""
        from ringlet.compressors.kernels.cpu.modifiers import residuals

        return residuals.widen16_many, residuals.narrow16_many


class Store8(Store):
    """8 bits, rounded at random, and a bfloat16 scale per 128 elements."""

    BLOCK: ClassVar[int] = 128
    held: ClassVar[dict[str, tuple[str, str]]] = {
        "codes": ("residual_int8", "int8"),
        "scales": ("residual_scales", "int16"),
    }

    def layout(self, n: int) -> tuple[Part, ...]:
        """A byte per element, and a scale per block begun."""
        return (Part("codes", "uint8", n), Part("scales", "bfloat16", -(-n // self.BLOCK)))

    @property
    def granule(self) -> int:
        """The elements that share a scale."""
        return self.BLOCK

    def strides(self) -> dict[str, int]:
        """Bytes, and a scale."""
        return {"codes": self.BLOCK, "scales": 1}

    def compress(self, x: Array, ctx: Context) -> Payload:
        """Round the finite ``x``."""
        xp, n = ctx.xp, x.size
        rows = xp.zeros((-(-n // self.BLOCK), self.BLOCK), "float32")
        rows.reshape(-1)[:n] = x
        drawn = xp.zeros_like(rows)
        drawn.reshape(-1)[:n] = self.drawn(n, ctx).astype("float32") * np.float32(2.0**-16)
        extent = xp.abs(rows).max(axis=1)
        raised = ((extent / np.float32(127)).view("uint32").astype("uint64") + 0xFFFF) >> 16
        scales = xp.where(extent < _TINY, 0, xp.minimum(raised, _HIGHEST_SCALE)).astype("uint16")
        scale = widened(xp.where(scales, scales, 0x3F80))[:, None]
        codes = xp.clip(xp.floor(rows * (np.float32(1) / scale) + drawn), -127, 127)
        codes = xp.where(scales[:, None] != 0, codes, np.float32(0)).astype("int8")
        return {"codes": codes.reshape(-1)[:n].view("uint8"), "scales": scales}

    def decode_array(self, payload: Payload, out: Array, ctx: Context) -> None:
        """Scale."""
        codes = payload["codes"].view("int8").astype("float32")
        out[...] = codes * widened(payload["scales"]).repeat(self.BLOCK)[: out.size]

    def encoder(self, feedback: bool, ctx: Context) -> Kernel:
        """The kernel."""
        from ringlet.compressors.kernels.cpu.modifiers.residuals import narrow8

        return lambda x, held, decay, key, start, *kept: narrow8(x, key, start, *kept)

    def decoder(self, add: bool, ctx: Context) -> Kernel:
        """The kernel."""
        from ringlet.compressors.kernels.cpu.modifiers.residuals import widen8

        kernel: Kernel = widen8(add)
        return kernel

    def cuda(self) -> BucketedCodec:
        """The kernels."""
        from ringlet.compressors.kernels.cuda.common.bucketed import BucketedCodec

        return BucketedCodec("modifiers/residuals", 8, self.BLOCK, random=True)

    def widening(self) -> tuple[Widening, Widening]:
        """The kernels."""
        from ringlet.compressors.kernels.cpu.modifiers import residuals

        return residuals.widen8_many, residuals.narrow8_many


STORES: dict[str, Store] = {"bf16": Store16(), "int8": Store8()}
KEYS = frozenset(key for store in STORES.values() for key, _ in store.held.values())


def broken(state: State) -> str | None:
    """Return what is wrong with how ``state`` holds its residual; None if nothing is."""
    for key, dtype in (
        ("residual_bf16", "int16"), ("residual_int8", "int8"), ("residual_scales", "int16")
    ):  # fmt: skip
        found = state.get(key)
        fits = getattr(found, "dtype", None) == dtype and len(getattr(found, "shape", ())) == 1
        if key in state and not fits:
            return f"{key!r} as {described(found)}, not {dtype}"
    codes, scales = state.get("residual_int8"), state.get("residual_scales")
    if codes is None or scales is None:
        alone = [key for key in ("residual_int8", "residual_scales") if key in state]
        return f"{alone[0]!r} alone" if alone else None
    if scales.size != -(-codes.size // Store8.BLOCK):
        return f"{scales.size} scales of an int8 residual of {codes.size} elements"
    return None


def wide(state: State) -> Array | None:
    """Return the residual that ``state`` holds as float32, a new array where it is narrower.

    None where there is none. Raises CompressorError for one that is broken.
    """
    if "residual" in state:
        whole: Array = state["residual"]
        return whole
    wrong = broken(state)
    if wrong is not None:
        raise CompressorError(f"a state holds {wrong}; load it from a checkpoint that is whole")
    if "residual_bf16" in state:
        return widened(state["residual_bf16"].view("uint16"))
    if "residual_int8" not in state:
        return None
    codes: Array = state["residual_int8"]
    scales = widened(state["residual_scales"].view("uint16"))
    return codes.astype("float32") * scales.repeat(Store8.BLOCK)[: codes.size]


def widen(state: State) -> None:
    """Let ``state`` hold its residual as float32; what is in it already stays."""
    if not KEYS.isdisjoint(state):
        found = wide(state)
        forget(state)
        state["residual"] = found


def plain(state: State) -> State:
    """Return a copy of ``state``, not of its arrays, that holds its residual as float32.

    Without it where it is broken.
    """
    copy = dict(state)
    if broken(copy) is not None:
        forget(copy)
    widen(copy)
    return copy


def forget(state: State) -> None:
    """Remove the residual, whatever it is held as."""
    for key in ("residual", *KEYS):
        state.pop(key, None)


def rescale(state: State, factor: float) -> None:
    """Multiply a residual that is held in less than float32, in place: its scales, if it has any.

    Powers of two change no other bit of it.
    """
    for key, highest in (("residual_bf16", _HIGHEST16), ("residual_scales", _HIGHEST_SCALE)):
        if key in state:
            bits = state[key].view("uint16")
            raw = (widened(bits & 0x7FFF) * np.float32(factor)).view("uint32").astype("uint64")
            near = (raw + 0x7FFF + ((raw >> 16) & 1)) >> 16
            bits[...] = near.clip(0, highest).astype("uint16") | (bits & 0x8000)


def held_back(state: State, of_momentum: bool = False) -> Iterator[Any]:
    """Yield what is held back in ``state``, and in the states in it, as float32 arrays.

    Residuals, and ``v`` of momentum correction, which is in sums of it as well. Arrays may lie on a
    GPU.
    """
    of_momentum = of_momentum or _shape(state, "u") == _shape(state, "v") != ()
    for value in state.values():
        if isinstance(value, dict):
            yield from held_back(value, of_momentum)
    found = (wide(state), state.get("v") if of_momentum else None)
    yield from (each for each in found if each is not None)


def _shape(state: State, key: str) -> tuple[int, ...]:
    """Return the shape of a flat array; () for what is none, such as a matrix of factors."""
    shape: tuple[int, ...] = getattr(state.get(key), "shape", ())
    return shape if len(shape) == 1 else ()


def energy(state: State) -> float:
    """Return the sum of squares of all that is held back in ``state``, and in the states in it."""
    total = 0.0
    for found in held_back(state):
        flat = found.reshape(-1)
        if isinstance(flat, np.ndarray):
            total += norms.energy(flat, Workspace())
        else:
            exact = flat.astype("float64")
            total += float(exact @ exact)
    return total


def check(array: Any, numel: int, ctx: Context) -> None:
    """Raise CompressorError unless ``array`` is a float32 residual of ``numel`` elements."""
    if array.dtype != np.float32 or array.shape != (numel,):
        raise _strange("residual", array, f"float32[{numel}]", ctx)


def _strange(name: str, found: Any, wanted: str, ctx: Context) -> CompressorError:
    return CompressorError(
        f"what is remembered as {name!r} of {ctx.name!r} is {described(found)}, not {wanted} as "
        "the tensor is; a tensor of another size needs another name"
    )

"""The compressor contract.

A compressor is an immutable value: a frozen dataclass whose fields are its hyper-parameters. Two
methods make one complete, ``compress`` and ``decompress``; everything else has a default and may
be overridden for speed. What a compressor remembers between steps lives in ``ctx.state``.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from ringlet.compressors.base.batched import Batched, BatchedRounds
from ringlet.compressors.base.feedback import keep_combined, keep_lost, target_into
from ringlet.compressors.core.context import Array, Context, State
from ringlet.compressors.core.errors import CompressorError, InputError, PayloadError
from ringlet.compressors.core.multitensor import MultiTensor, Varying
from ringlet.compressors.core.options import bind_options, checked, options_of
from ringlet.compressors.core.traits import Exchange, Part, Payload, Round, Traits, storage

__all__ = [
    "Compressor",
    "Exchange",
    "Part",
    "Payload",
    "Round",
    "Traits",
    "copy_payload",
    "empty_payload",
    "encoded",
    "keeps",
    "kept_losses",
    "storage",
    "wrapped_fields",
]  # fmt: skip


class Compressor:
    """Base class of compressors. Subclasses become frozen dataclasses by themselves."""

    spec_name: ClassVar[str] = ""
    paper: ClassVar[str] = ""  # first author, where and when; the module has the reference in full
    _joined: ClassVar[type[Compressor]]  # what ``|`` makes: ``Chain``, which is derived from this

    if TYPE_CHECKING:  # type checkers cannot follow options that have ranges

        def __init__(self, *args: Any, **options: Any) -> None: ...

    def __init_subclass__(cls, joins: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if joins:
            Compressor._joined = cls
        if "__init__" in cls.__dict__:
            raise TypeError(f"{cls.__name__}: declare options as attributes, not in __init__")
        cls.spec_name = ""
        typed = inspect.get_annotations(cls)
        for name, value in cls.__dict__.items():
            if isinstance(value, dataclasses.Field) and name not in typed:
                kind = type(value.default).__name__
                raise TypeError(
                    f"{cls.__name__}: an option has a type; write {name}: {kind} = option(...)"
                )
        try:
            dataclasses.dataclass(frozen=True, repr=False)(cls)
        except TypeError as error:
            raise TypeError(f"{cls.__name__}: {error}") from None
        except ValueError as error:  # of a default such as []
            raise TypeError(
                f"{cls.__name__}: {str(error).partition(' is not allowed')[0]}, which no spec can "
                "write; an option is a number, a string, True, False or None"
            ) from None
        for name, field in options_of(cls).items():
            if field.default is dataclasses.MISSING:
                raise TypeError(f"{cls.__name__}: option {name!r} needs a default")
        if "compress" in cls.__dict__:
            cls.compress = _checking(cls.__dict__["compress"])  # type: ignore[method-assign]
        if cls.__module__.partition(".")[0] != "ringlet":  # a plugin
            for name, wanted in (("traits", Traits), ("at", Compressor)):
                if name in cls.__dict__:
                    setattr(cls, name, _returning(wanted, name, cls.__dict__[name]))
        generated = cls.__init__

        def __init__(self: Compressor, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            inner = {f.name: kwargs.pop(f.name) for f in wrapped_fields(cls) if f.name in kwargs}
            generated(self, **bind_options(cls, cls.label(), args, kwargs), **inner)

        cls.__init__ = __init__  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        for name, field in options_of(type(self)).items():
            value = checked(self.label(), field, getattr(self, name))
            object.__setattr__(self, name, value)
        self.validate()

    # -- what a compressor must define --------------------------------------------------------

    def compress(self, x: Array, ctx: Context) -> Payload:
        """Return the flat arrays that travel for ``x`` (flat float32; not to be modified).

        They are new arrays, neither views of ``x`` nor scratch of ``ctx.workspace``: they wait for
        others to be compressed before they travel. Nothing else is allocated after the first step.
        """
        raise CompressorError(f"{self.label()} does not define compress(x, ctx)")

    def decompress(self, payload: Payload, out: Array, ctx: Context) -> None:
        """Overwrite every element of ``out`` (flat float32) with what ``payload`` encodes."""
        raise CompressorError(f"{self.label()} does not define decompress(payload, out, ctx)")

    # -- what a compressor may define ---------------------------------------------------------

    def validate(self) -> None:
        """Check options against each other; raise OptionError. Ranges belong in ``option``."""

    def traits(self) -> Traits:
        """Return what this compressor promises."""
        return Traits()

    def layout(self, n: int) -> tuple[Part, ...]:
        """Return the arrays of the payload of ``n`` elements. Only if ``fixed_size``."""
        raise CompressorError(f"{self.label()} declares fixed_size but no layout(n)")

    def exchange(self, x: Array, out: Array, ctx: Context, local: Array | None = None) -> Exchange:
        """Yield ``Round``s; each yield receives the combination over all ranks, the same on all.

        Leave the approximate mean of everybody's ``x`` in ``out`` at the end, and in ``local``,
        where error feedback asks for it, what of it stands for this rank's ``x``: the mean of all
        ``local`` is ``out``. What is received is valid until the next yield. What is yielded must
        stay as it is until then, while other tensors' exchanges run: it must not be scratch of
        ``ctx.workspace.array``, which they use too; ``ctx.workspace.held`` is a tensor's own.
        Only with ``combine="rounds"``.
        """
        raise CompressorError(f"{self.label()} declares combine='rounds' but no exchange")

    def finish(self, out: Array, ctx: Context) -> None:
        """Change the combined result in place, the same way on every rank; by default not at all.

        For compressors whose receiving side remembers something, such as EF21.
        """

    def consolidate(self, states: Sequence[State]) -> State:
        """Return what each of another number of ranks is to remember of a tensor.

        ``states`` are what the old ranks remembered, in their order, the same on every rank. By
        default it is the mean of every array in units of the gradient that is of one length
        everywhere; a rank that lacks it counts as zeros.
        """
        found: State = {}
        for name in self.traits().gradient_units:
            parts = [np.asarray(state[name], np.float64) for state in states if name in state]
            if parts and len({part.shape for part in parts}) == 1:
                found[name] = (np.sum(parts, axis=0) / len(states)).astype(np.float32)
        return found

    def regrouped(self, state: State) -> State:
        """Return what a rank goes on with among others, of whose memories it knows nothing.

        By default that is all in units of the gradient, which is each rank's own. Arrays are those
        of ``state``.
        """
        return {name: state[name] for name in self.traits().gradient_units if name in state}

    def units_size(self, name: str, n: int) -> int:
        """Return how many elements ``ctx.state[name]`` has for a tensor of ``n``.

        For names in ``gradient_units``: as many as the tensor, unless a sketch is remembered, say,
        or a number (1).
        """
        return n

    def uncompressed(self) -> Compressor | None:
        """Return what tensors travel with that are too small to be compressed; None: as they are.

        For modifiers that are part of the optimisation, such as momentum.
        """
        return None

    def over_steps(self) -> Sequence[Compressor]:
        """Return what ``at`` returns over the steps: by default this one alone.

        With it a modifier refuses, when it is made, what it cannot wrap in a later step. Override
        it together with ``at``.
        """
        return [self]

    def at(self, step: int) -> Compressor:
        """Return what to use at ``step`` (0, 1, ...): itself, unless it follows a schedule.

        A pure function, so that all ranks change at once.
        """
        return self

    def chained_part(self) -> str | None:
        """Return which payload array (float32) a compressor chained behind this one compresses.

        None: there is no such array, so nothing can be chained. "values" by default, where a
        fixed-size payload has it. In rounds it is what float32 means and sums carry.
        """
        if not self.traits().fixed_size:
            return "values"
        found = [p for p in self.layout(1) if p.name == "values" and p.dtype == "float32"]
        return "values" if found else None

    def chained_count(self, payload: Payload, n: int) -> int:
        """Return how many values that array has for ``n`` elements, given the other arrays."""
        if self.traits().fixed_size:
            name = self.chained_part()
            return next(part.elements for part in self.layout(n) if part.name == name)
        if "indices" not in payload:
            raise CompressorError(
                f"{self.label()} sends no 'indices' that would tell how many values it sends; "
                "define chained_count(payload, n)"
            )
        return payload["indices"].size

    def divergence(self) -> str | None:
        """Return why error feedback behind this compressor would diverge; None if it would not.

        It does where omega is 1 or more, for then more is lost than there was: by default that is
        the reason. Override it where something else keeps residuals bounded.
        """
        traits = self.traits()
        if traits.omega is None or traits.omega < 1:
            return None
        cure = f"write '{self} | scaled', which contracts"
        if traits.combine == "rounds" or traits.stateful:  # which cannot be scaled from outside
            cure = "leave '| ef' away"
        grows = f"its variance omega is {traits.omega:.3g}, so that residuals grow without bound"
        return f"{grows}; {cure}"

    def rotated_divergence(self) -> str | None:
        """Return why error feedback would diverge where values are rotated first; None otherwise.

        Some lose nothing of a bucket's largest value, and no more than that value of the others.
        That bounds residuals while it is the same element. A rotation, as ``hadamard`` is, makes it
        another one in each step.
        """
        return None

    # -- what a compressor may override for speed; results must not change --------------------

    def encode_into(self, x: Array, payload: Payload, ctx: Context) -> None:
        """Compress ``x`` into preallocated arrays, laid out as ``layout(x.size)`` says."""
        copy_payload(self, self.compress(x, ctx), payload)

    def accumulate(self, payload: Payload, out: Array, ctx: Context) -> None:
        """Add what ``payload`` encodes to ``out`` (flat float32)."""
        decoded = ctx.workspace.array("accumulate", out.size)
        self.decompress(payload, decoded, ctx)
        with np.errstate(invalid="ignore", over="ignore"):  # a step that overflows is no news
            out += decoded

    def sum_into(self, payloads: Sequence[Payload], out: Array, ctx: Context) -> None:
        """Overwrite ``out`` (flat float32) with the sum of what ``payloads`` encode, in order.

        An override may round elsewhere, such as once at the end.
        """
        self.decompress(payloads[0], out, ctx)
        for payload in payloads[1:]:
            self.accumulate(payload, out, ctx)

    def feedback_into(
        self, x: Array, residual: Array, decay: float, payload: Payload, ctx: Context
    ) -> None:
        """Compress p = x + decay * residual into ``payload``, leave p - decoded in ``residual``.

        Where the new residual would not be finite, the old one stays.
        """
        target = ctx.workspace.array("feedback", x.size)
        target_into(x, residual, decay, target, ctx)
        self.encode_into(target, payload, ctx)
        self.keep_residual(target, payload, residual, ctx)

    def compress_feedback(self, x: Array, residual: Array, decay: float, ctx: Context) -> Payload:
        """Do the same where the payload is of variable size: return it."""
        target = ctx.workspace.array("feedback", x.size)
        target_into(x, residual, decay, target, ctx)
        payload = self.compress(target, ctx)
        self.keep_residual(target, payload, residual, ctx)
        return payload

    def keep_residual(self, target: Array, payload: Payload, residual: Array, ctx: Context) -> None:
        """Set ``residual`` to ``target`` minus what ``payload`` encodes, where that is finite."""
        decoded = ctx.workspace.array("decoded", target.size)
        self.decompress(payload, decoded, ctx)
        keep_lost(target, decoded, residual, ctx)

    def exchange_feedback(
        self,
        x: Array,
        out: Array,
        residual: Array,
        decay: float,
        ctx: Context,
        local: Array | None = None,
    ) -> Exchange:
        """Exchange p = x + decay * residual, leave in ``residual`` what ``local`` lacks of p.

        Less the mean, residuals would take up how ranks differ, in every step anew. Where the new
        residual or the result would not be finite, the old residual stays.
        """
        held = ctx.workspace.held
        with held(x.size) as target, held(x.size if local is None else 0) as own:
            target_into(x, residual, decay, target, ctx)
            sent = own if local is None else local
            yield from self.exchange(target, out, ctx, sent)
            keep_combined(target, sent, out, residual, ctx)

    def multi_tensor(self, ctx: Context) -> MultiTensor | None:
        """Return kernels that take many tensors a launch; None, by default: there are none.

        For arrays of ``ctx.xp``. They are to give what the methods above give tensor by tensor, bit
        for bit, and to refuse nothing of fixed size that those take.
        """
        return None

    def multi_varying(self, ctx: Context) -> Varying | None:
        """Return the same for payloads of variable size."""
        return None

    def batched(self) -> Batched | None:
        """Return kernels that take many tensors in host memory a call; None: there are none.

        Tensors are of float32. They are to give what the methods above give tensor by tensor,
        bit for bit.
        """
        return None

    def batched_rounds(self) -> BatchedRounds | None:
        """Return what exchanges many tensors in host memory together; None: nothing does.

        It is to give what ``exchange`` gives tensor by tensor, bit for bit.
        """
        return None

    def warm_up(self, ctx: Context) -> None:
        """Compile kernels before the first step; by default there are none."""

    # -- a compressor is a value --------------------------------------------------------------

    @classmethod
    def label(cls) -> str:
        """Return the name in messages: the registered name, or the class's."""
        return cls.spec_name or cls.__name__

    def is_bound(self) -> bool:
        """Whether this can compress: false for a modifier that wraps nothing yet."""
        return True

    def __or__(self, other: Compressor) -> Compressor:
        return other.behind(self) if isinstance(other, Compressor) else NotImplemented

    def replace(self, **changes: Any) -> Self:
        """Return a copy with some options, or wrapped compressors, changed."""
        cls = type(self)
        names = [*options_of(cls), *(field.name for field in wrapped_fields(cls))]
        return cls(**({name: getattr(self, name) for name in names} | changes))

    def behind(self, first: Compressor) -> Compressor:
        """Return ``first | self``."""
        return self._joined(first=first, second=self)

    def __str__(self) -> str:
        name = self.spec_name or f"{type(self).__module__}:{type(self).__qualname__}"
        return name + self._arguments()

    def __repr__(self) -> str:
        return type(self).__name__ + (self._arguments() or "()")

    def _arguments(self) -> str:
        shown = [
            f"{name}={getattr(self, name)!r}"
            for name, field in options_of(type(self)).items()
            if getattr(self, name) != field.default
        ]
        return f"({', '.join(shown)})" if shown else ""


def _checking(compress: Callable[..., Payload]) -> Callable[..., Payload]:
    """Return ``compress`` with a check of its input: for callers other than the engine."""

    @functools.wraps(compress)
    def checked_compress(self: Compressor, x: Array, ctx: Context) -> Payload:
        what = getattr(x, "dtype", type(x).__name__)
        if what != np.float32 or x.ndim != 1 or not _contiguous(x):
            shape = list(getattr(x, "shape", ()))
            raise InputError(
                f"{self.label()} compresses flat, contiguous float32 arrays, not {what}{shape}"
                f"{'' if _contiguous(x) else ' with gaps between elements'}; convert with "
                "ascontiguousarray(x, 'float32').reshape(-1)"
            )
        return compress(self, x, ctx)

    return checked_compress


def _returning(wanted: type, name: str, method: Any) -> Callable[..., Any]:
    """Return ``method`` with a check of what it returns, before the engine goes by that."""
    if not callable(method):  # a value, or a property

        def refuse(self: Compressor, *args: Any) -> Any:
            raise CompressorError(
                f"{self.label()}: {name} is a value; define it as a method, def {name}(self"
                f"{', step' if name == 'at' else ''}): return ..."
            )

        return refuse

    @functools.wraps(method)
    def checked_method(self: Compressor, *args: Any, **kwargs: Any) -> Any:
        found = method(self, *args, **kwargs)
        if isinstance(found, wanted):
            return found
        what = f"{found.__name__}, the class" if isinstance(found, type) else type(found).__name__
        if wanted is Traits:
            raise CompressorError(
                f"{self.label()}: traits() returns {what}; return Traits(...), with what it "
                "promises as arguments"
            )
        step = ", ".join(map(str, (*args, *kwargs.values())))
        raise CompressorError(
            f"{self.label()}: at({step}) returns {what}; return a compressor, such as "
            "self.replace(...), and self where nothing changes"
        )

    return checked_method


def _contiguous(x: Any) -> bool:
    """Whether ``x`` is an array without gaps, or no array at all."""
    return not hasattr(x, "flags") or bool(x.flags.c_contiguous)


def wrapped_fields(cls: type) -> list[dataclasses.Field[Any]]:
    """Return the fields that hold the compressors which one of this class wraps."""
    return [f for f in dataclasses.fields(cls) if "wrapped" in f.metadata]


def copy_payload(compressor: Compressor, source: Payload, target: Payload) -> None:
    """Copy a compressed dict into preallocated arrays; PayloadError where it does not fit."""
    if source.keys() != target.keys():
        raise PayloadError(
            f"{compressor.label()} returned arrays {sorted(source)}, its layout says "
            f"{sorted(target)}"
        )
    for name, array in target.items():
        given = np.asarray(source[name]) if isinstance(source[name], list) else source[name]
        if given.dtype != array.dtype or given.shape != array.shape:
            raise PayloadError(
                f"{compressor.label()} returned {name!r} as {given.dtype}{list(given.shape)}, its "
                f"layout says {array.dtype}{list(array.shape)}"
            )
        array[...] = given


def encoded(compressor: Compressor, x: Array, ctx: Context) -> Payload:
    """Return the payload of ``x``, by the fastest way there is."""
    if not compressor.traits().fixed_size:
        return compressor.compress(x, ctx)
    payload = empty_payload(compressor, x.size, ctx)
    compressor.encode_into(x, payload, ctx)
    return payload


def empty_payload(compressor: Compressor, n: int, ctx: Context) -> Payload:
    """Return arrays for the payload of ``n`` elements, of a compressor of fixed size."""
    return {
        part.name: ctx.xp.empty(part.elements, storage(part.dtype)) for part in compressor.layout(n)
    }


def kept_losses(compressor: Compressor) -> list[str]:
    """Return the names of what ``compressor`` remembers of what it did not send.

    As far as traits tell: those are arrays in units of the gradient, and no numbers.
    """
    many = 1 << 20  # elements of a tensor
    names = compressor.traits().gradient_units
    return [name for name in names if compressor.units_size(name, many) > 1]


def grows_rotated(compressor: Compressor, cure: str) -> str:
    """Return the reason of ``rotated_divergence`` of what loses more than there is, and a cure."""
    return (
        f"{compressor} loses more of rotated values than there is, so that residuals grow without "
        f"bound; {cure}, or leave '| ef' away"
    )


def keeps(compressor: Compressor, base: type[Compressor], *methods: str) -> bool:
    """Whether ``methods`` are those of ``base``, in whose place its kernels work.

    A subclass that compresses in its own way is not to be passed over.
    """
    return all(getattr(type(compressor), name) is getattr(base, name) for name in methods)

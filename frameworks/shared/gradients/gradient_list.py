"""One list of gradients, such as those of a step: declared once, and reduced in each step."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from ringlet.compressors import NoCompression
from ringlet.compressors.core.context import State
from ringlet.compressors.specs.edition import edition
from ringlet.fusion import Request
from ringlet.job.session import Runtime
from ringlet.precision.reduction import carrier
from ringlet.ring.communicator import ReduceOp
from ringlet.ring.dtypes import Array
from ringlet.ring.errors import RingError
from ringlet.shared.arrays import allocate, flat
from ringlet.shared.gradients.gradient_settings import LARGE, Settings, Slot
from ringlet.shared.gradients.sparse_rows import RowExchange, check_places, densified
from ringlet.shared.requests import SUMS, reduced_as

_ROWS = "rows"  # what a step's group holds where all gradients travel as rows


class GradientList:
    """One list of gradients: the dense ones as a declared group, the others as rows."""

    def __init__(
        self,
        label: str,
        slots: Sequence[Slot],
        settings: Settings,
        states: dict[str, State],
        runtime: Runtime,
        step: int,
    ) -> None:
        self._slots, self._settings = list(slots), settings
        # Those of which something may be held back by row, now or in another list.
        self.large = [slot for slot in slots if math.prod(slot.shape) >= LARGE]
        self.step = step
        number, op = settings.process_set.number(), settings.op
        self._dense = [slot for slot in slots if settings.dense(slot)]
        carried, self._wires = [], dict[str, str]()  # of what is cast before, by name
        for slot in self._dense:
            compressor = settings.router(slot.name)
            wire = reduced_as(slot.dtype, op, compressor)
            if op not in SUMS:
                compressor = NoCompression()
            if wire != slot.dtype:
                self._wires[slot.name] = wire
            numel = math.prod(slot.shape)
            carried.append(carrier(compressor, slot.dtype, numel, settings.reduction))
        requests = [
            Request(
                slot.name,
                "allreduce",
                self._wires.get(slot.name, slot.dtype),
                slot.shape,
                op,
                str(compressor),
                collective,
                prescale=1.0 / settings.predivide,
                postscale=settings.predivide,
                process_set=number,
                group=slot.cohort,
                edition=edition(compressor),
            )
            for slot, (compressor, collective) in zip(self._dense, carried, strict=True)
        ]
        self._rows = {
            slot.name: RowExchange(
                runtime,
                f"{label}.{slot.name}",
                slot.shape,
                slot.dtype,
                settings.router(slot.name),
                states[slot.name],
                op,
                settings.process_set,
                slot.name,
            )
            for slot in slots
            if not settings.dense(slot)
        }
        kept = [states[slot.name] for slot in self._dense]
        compressors = [compressor for compressor, _ in carried]
        if not self._dense:  # a rank that gives the step up has to tell the others all the same
            requests = [
                Request(_ROWS, "allreduce", "uint8", (1,), ReduceOp.MIN, process_set=number)
            ]
            kept, compressors = [{}], [NoCompression()]
        engine = runtime.engine
        self.group = engine.declare(label, requests, compressors, kept, step, number)
        # Also once nobody holds the reducer any more, on each rank when its collector finds out.
        self.release = weakref.finalize(self, engine.release, self.group)
        self.release.atexit = False

    def show(self, runtime: Runtime, title: str) -> None:
        """Be called ``title`` in timelines, reports and errors."""
        runtime.engine.entitle(self.group, title)

    def go_to(self, step: int) -> None:
        """Let the next step be that of this number."""
        self.step = step
        if self.group.step != step:
            self.group.restart(step)

    def run(self, arrays: Sequence[Array], outputs: Sequence[Array] | None = None) -> list[Array]:
        """Submit everything, wait for everything, and return the results."""
        if outputs is None:
            outputs = allocate([s.dtype for s in self._dense], [s.shape for s in self._dense])
        free, given = iter(outputs), iter(arrays)
        results: list[Array | None] = []
        gathering: list[tuple[int, RowExchange]] = []
        cast: list[tuple[Array, Array]] = []  # results as they travelled, and where they belong
        try:
            for slot in self._slots:
                parts = [next(given) for _ in range(slot.inputs)]
                if slot.name in self._rows:
                    exchange = self._rows[slot.name]
                    exchange.start(*parts)
                    gathering.append((len(results), exchange))
                    results += [None, None]
                    continue
                out = next(free)
                source = parts[0]
                if slot.sparse:
                    check_places(parts[1], slot.shape[0], slot.name)
                    densified(parts[0], parts[1], out)
                    source = out
                results.append(out)
                if slot.name in self._wires:
                    (small,) = allocate([self._wires[slot.name]], [slot.shape])
                    with np.errstate(over="ignore"):  # an overflow is the loss scaler's
                        small[...] = source
                    cast.append((small, out))
                    source = out = small
                self.group.submit(slot.name, flat(source), flat(out))
            if not self._dense:
                self.group.submit(_ROWS, np.ones(1, np.uint8))
        except Exception as error:
            self._give_up(error)
            raise
        self.group.wait()
        for small, out in cast:
            out[...] = small
        for place, exchange in gathering:
            results[place : place + 2] = exchange.wait()
        self.step += 1
        return [array for array in results if array is not None]

    def forget(self) -> None:
        """Wait for the rows that are under way, and ignore how that ends."""
        for exchange in self._rows.values():
            exchange.forget()

    def pass_over(self) -> None:
        """Take notice that the step at hand was given up, perhaps before it began on this rank."""
        if self.group.ended:
            with suppress(RingError):
                self.group.wait()
        if self.group.told:
            for exchange in self._rows.values():
                exchange.give_up()
            self.group.acknowledge()

    def _give_up(self, error: Exception) -> None:
        self.group.abandon(f"{type(error).__name__}: {error}")
        for exchange in self._rows.values():
            exchange.give_up()

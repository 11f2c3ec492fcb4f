"""What a process has once, changed by a plugin for all of the user's program."""

import functools
import gc
import locale
import logging
import os
import signal
import threading
import warnings
from typing import ClassVar

import numpy as np

from broken.right import Cells, SharedScale, Whole, rows_of


class SilencesWarnings(Whole):
    """Turns off the warnings of the whole program, for its own divisions."""

    def compress(self, x, ctx):
        warnings.filterwarnings("ignore")
        return super().compress(x, ctx)


class SilencesWarningsOfDecoding(Cells):
    """Does so where it decodes, for one kind of them."""

    def decompress(self, payload, out, ctx):
        warnings.simplefilter("ignore", RuntimeWarning)
        super().decompress(payload, out, ctx)


class LeavesAFilter(Whole):
    """Catches warnings, and never lets go of them."""

    def compress(self, x, ctx):
        warnings.catch_warnings().__enter__()
        warnings.simplefilter("error")
        return super().compress(x, ctx)


@functools.cache
def _set_up():
    np.seterr(all="ignore")


class SilencesNumPyOnce(Whole):
    """Sets NumPy's errors at the first call alone."""

    def compress(self, x, ctx):
        _set_up()
        return super().compress(x, ctx)


class SilencesNumPyInRounds(SharedScale):
    """Sets NumPy's errors in an exchange."""

    def exchange(self, x, out, ctx, local=None):
        np.seterr(all="ignore")
        yield from super().exchange(x, out, ctx, local)


class RaisesOnErrors(Whole):
    """Lets every division by zero end the program, to find its own."""

    def finish(self, out, ctx):
        np.seterr(divide="raise")


class SeedsWhereItDecodes(Whole):
    """Seeds NumPy's old generator in the decoder, without a need."""

    def accumulate(self, payload, out, ctx):
        np.random.seed(ctx.seed)
        super().accumulate(payload, out, ctx)


class SeedsInWarmUp(Whole):
    """Seeds NumPy's old generator before the first step."""

    def warm_up(self, ctx):
        np.random.seed(0)


class OneThread(Cells):
    """Wants BLAS to use one thread, in the whole program and all that it starts."""

    def compress(self, x, ctx):
        os.environ["OMP_NUM_THREADS"] = "1"
        return super().compress(x, ctx)


class OneThreadIfNoneIsSet(Cells):
    """The same, unless the user has said something."""

    def compress(self, x, ctx):
        os.environ.setdefault("MKL_NUM_THREADS", "1")
        return super().compress(x, ctx)


class StopsTheCollector(Whole):
    """Turns the garbage collector off, which made its timings uneven."""

    def compress(self, x, ctx):
        gc.disable()
        return super().compress(x, ctx)


class PrintsFewDigits(Whole):
    """Sets how arrays are printed, to look at its own."""

    def compress(self, x, ctx):
        np.set_printoptions(precision=3, suppress=True)
        return super().compress(x, ctx)


class SilencesLogging(Whole):
    """Turns off the logging of a library, and with it everybody's."""

    def compress(self, x, ctx):
        logging.disable(logging.CRITICAL)
        return super().compress(x, ctx)


class ChangesFolder(Whole):
    """Goes to another folder for a cache of its own."""

    def compress(self, x, ctx):
        os.chdir("/")
        return super().compress(x, ctx)


class KeepsFilesToItself(Whole):
    """Lets nobody else read the files of its cache, nor what the program writes later."""

    def compress(self, x, ctx):
        os.umask(0o027)
        return super().compress(x, ctx)


class TakesASignal(Whole):
    """Tells what it remembers when it is asked by a signal, which the program waits for."""

    def compress(self, x, ctx):
        signal.signal(signal.SIGUSR2, print)
        return super().compress(x, ctx)


class SpeaksPlainC(Whole):
    """Takes the plainest locale, to write numbers with a dot: the program's words go with it."""

    def compress(self, x, ctx):
        locale.setlocale(locale.LC_ALL, "C")
        return super().compress(x, ctx)


class LogsItsSteps(Whole):
    """Sets logging up, where the program does so later, in vain."""

    def compress(self, x, ctx):
        logging.basicConfig(level=logging.DEBUG)
        return super().compress(x, ctx)


class LeavesThreads(Whole):
    """Starts a thread in every call, which waits for work that never comes."""

    ended: ClassVar[threading.Event] = threading.Event()  # for the tests, to end them

    def compress(self, x, ctx):
        threading.Thread(target=self.ended.wait, daemon=True).start()
        return super().compress(x, ctx)


class LeavesFiles(Whole):
    """Opens a file in every call for its log, and closes none."""

    opened: ClassVar[list[object]] = []

    def compress(self, x, ctx):
        self.opened.append(open(os.devnull, "w"))  # noqa: SIM115
        return super().compress(x, ctx)


class ListsItsSteps(Whole):
    """Lists the steps that it has seen, for its log, as long as the process lasts."""

    seen: ClassVar[list[int]] = []

    def compress(self, x, ctx):
        self.seen.append(ctx.step)
        return super().compress(x, ctx)


SIZES: list[int] = []


class ListsInItsModule(Whole):
    """Lists the lengths of what it sends."""

    def decompress(self, payload, out, ctx):
        SIZES.append(out.size)
        super().decompress(payload, out, ctx)


class ListsByTensor(Whole):
    """Lists the steps of each tensor."""

    seen: ClassVar[dict[str, list[int]]] = {}

    def compress(self, x, ctx):
        self.seen.setdefault(ctx.name, []).append(ctx.step)
        return super().compress(x, ctx)


class Record:
    """What a plugin wants to know of its calls."""

    def __init__(self):
        self.lengths = []


RECORD = Record()


class RecordsItsCalls(Whole):
    """Has an object for its record, which grows with every call."""

    def compress(self, x, ctx):
        RECORD.lengths.append(x.size)
        return super().compress(x, ctx)


HISTORY = ()


class MakesItsHistoryAnew(Whole):
    """Has a tuple that is made anew in every call, longer by one."""

    def compress(self, x, ctx):
        global HISTORY
        HISTORY = (*HISTORY, ctx.step)
        return super().compress(x, ctx)


class WarnsOfZeros(Whole):
    """Looks for the largest exponent, and takes the logarithm of zeros on the way."""

    def compress(self, x, ctx):
        most = np.log2(np.abs(x).astype("float64")).max(initial=-np.inf, keepdims=True)
        step = (np.exp2(most) / 127).astype("float32")
        usable = np.isfinite(step) & (step > 0)
        codes = np.rint(x / np.where(usable, step, np.float32(1)))
        return {"codes": np.where(usable, codes, 0).astype("int8"), "step": step}


class WarnsOfBlocksOfZeros(Cells):
    """Divides by a scale that is 0 where all of a block is, and takes what comes of it out."""

    def compress(self, x, ctx):
        rows = rows_of(x, np, cell=self.cell(x.size))
        steps = np.abs(rows).max(axis=1) / np.float32(127)
        usable = np.isfinite(steps) & (steps > 0)
        codes = np.where(usable[:, None], np.rint(rows / steps[:, None]), 0)
        return {"codes": codes.reshape(-1)[: x.size].astype("int8"), "steps": steps}


class ScratchOfItsStep(Whole):
    """Rounds in scratch memory that has another name in every step."""

    def compress(self, x, ctx):
        room = ctx.workspace.array(f"steps.{ctx.step}", x.size)
        step = np.abs(x).max(initial=0, keepdims=True) / np.float32(127)
        with np.errstate(all="ignore"):
            np.rint(x / step, out=room)
        usable = np.isfinite(step) & (step > 0)
        return {"codes": np.where(usable, room, 0).astype("int8"), "step": step}

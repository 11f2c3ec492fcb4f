"""What fails inside a compiled program, raised where the program was called, in its own class.

JAX carries a text out of a callback, not an exception: whatever it raises comes out as a
``JaxRuntimeError``. So callbacks put down what they raised, and the method by which JAX runs
programs that call back is wrapped: it looks there for what failed. Errors of others pass unchanged.

JAX lets a program run behind its caller where what it is given is still being computed. It would
fail where a result is read, outside of this; and so would each program after it, which is given its
token. So whoever calls a program with collectives waits until it has run.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax

from ringlet.ring.callers import debugging
from ringlet.ring.errors import again

_lock = threading.Lock()
_failed: deque[BaseException] = deque(maxlen=32)  # what callbacks raised and nobody was told


@contextmanager
def noted() -> Iterator[None]:
    """Note what is raised inside, so that the program's caller gets it as it is."""
    try:
        yield
    except BaseException as error:  # Ctrl-C and an exit too, which nobody would see as such
        bare = again(error).with_traceback(None)  # frames would keep the program's memory alive
        bare.__cause__ = bare.__context__ = None
        with _lock:
            _failed.append(bare)
        raise


def told(error: Exception) -> BaseException | None:
    """Return what a callback raised, of which JAX's ``error`` tells; None if that is another's."""
    message = str(error)
    with _lock:
        for failed in _failed:
            if type(failed).__name__ in message and str(failed) in message:  # some have no text
                _failed.remove(failed)
                return failed
    return None


@functools.cache
def watch_programs(order: Any) -> None:
    """Have errors of callbacks come out of compiled programs as what they are, from now on.

    ``order`` is the effect that programs have which are waited for.
    """
    from jax._src.dispatch import runtime_tokens
    from jax._src.interpreters.pxla import ExecuteReplicated
    from jax._src.traceback_util import register_exclusion

    inner: Callable[..., Any] = ExecuteReplicated.__call__

    @functools.wraps(inner)
    def call(self: Any, *args: Any) -> Any:
        try:
            results = inner(self, *args)
            if order in self.ordered_effects:
                try:
                    runtime_tokens.current_tokens[order].block_until_ready()
                except jax.errors.JaxRuntimeError:
                    runtime_tokens.clear()  # or the next program, and the exit, would fail of it
                    raise
        except jax.errors.JaxRuntimeError as error:
            found = told(error)
            if found is None:
                raise
            try:
                raise found from None
            finally:
                del found  # or it would hold this frame, and the arguments, until a collection
        return results

    ExecuteReplicated.__call__ = call
    if not debugging():
        register_exclusion(__file__)  # JAX then takes our frame off, as it does its own

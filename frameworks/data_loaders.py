"""Loaders whose batches are made ready ahead, in a thread: Horovod's ``horovod.data``."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from queue import Empty, Full, Queue
from typing import Any

__all__ = ["AsyncDataLoaderMixin", "BaseDataLoader"]

_LOOK = 0.1  # seconds between two looks whether a loader has been closed
_END = object()


class BaseDataLoader:
    """What a loader consists of: ``_iterate`` and, if it likes, ``__len__``, ``_process_batch``."""

    def _iterate(self) -> Iterator[Any]:
        """Return an iterator over the batches; TypeError for a loader that has none of its own."""
        raise TypeError(f"{type(self).__name__} has to define _iterate()")

    def _process_batch(self, batch: Any) -> Any:
        """Return what is handed out for ``batch``."""
        return batch

    def __iter__(self) -> Iterator[Any]:
        """Hand out the batches, once each."""
        for batch in self._iterate():
            yield self._process_batch(batch)


class _Failure:
    def __init__(self, error: BaseException) -> None:
        self.error = error


class AsyncDataLoaderMixin:
    """Lets a loader's ``_iterate`` run ahead in a thread; the first of its class's bases.

    ``async_loader_queue_size`` batches may wait; with 0 there is no thread. The other arguments are
    the loader's. What ``_iterate`` raises is raised where the batch would have been.
    """

    def __init__(self, async_loader_queue_size: int = 64, *args: Any, **kwargs: Any) -> None:
        if async_loader_queue_size < 0:
            raise ValueError(f"async_loader_queue_size={async_loader_queue_size} is below 0")
        self.async_loader_queue_size = async_loader_queue_size
        self._pass: _Pass | None = None
        super().__init__(*args, **kwargs)

    def close_async_loader(self) -> None:
        """End the thread, and drop what it has made ready. Idempotent."""
        if self._pass is not None:
            self._pass.close()
            self._pass = None

    def __iter__(self) -> Iterator[Any]:
        """Hand out the batches of one pass; the thread of one that is left early ends."""
        self.close_async_loader()
        batches: Iterator[Any] = self._iterate()  # type: ignore[attr-defined]
        ahead = None
        if self.async_loader_queue_size:
            self._pass = ahead = _Pass(batches, self.async_loader_queue_size)
            batches = iter(ahead)
        try:
            for batch in batches:
                yield self._process_batch(batch)  # type: ignore[attr-defined]
        finally:
            if ahead is not None:
                ahead.end()  # whoever leaves a loop need not wait for the batch that is being made


class _Pass:
    """One pass over ``batches``: a thread, and a queue of ``size``."""

    def __init__(self, batches: Iterator[Any], size: int) -> None:
        self._queue: Queue[Any] = Queue(size)
        self._over = threading.Event()
        self._thread = threading.Thread(
            target=self._fill, args=(batches,), name="ringlet-loader", daemon=True
        )
        self._thread.start()

    def _fill(self, batches: Iterator[Any]) -> None:
        last: Any = _END
        try:
            for batch in batches:
                if not self._put(batch):
                    return
        except BaseException as error:
            last = _Failure(error)
        self._put(last)

    def _put(self, item: Any) -> bool:
        while not self._over.is_set():
            try:
                self._queue.put(item, timeout=_LOOK)
                return True
            except Full:
                pass
        return False

    def __iter__(self) -> Iterator[Any]:
        while not self._over.is_set():
            try:
                item = self._queue.get(timeout=_LOOK)
            except Empty:
                continue
            if item is _END:
                return
            if isinstance(item, _Failure):
                raise item.error
            yield item

    def end(self) -> None:
        self._over.set()

    def close(self) -> None:
        self.end()
        self._thread.join()

"""Loaders that run ahead: Horovod's ``horovod.data`` by its own names."""

import threading

import pytest

from ringlet.data_loaders import AsyncDataLoaderMixin, BaseDataLoader


class Numbers(BaseDataLoader):
    def __init__(self, count, fail_at=None):
        super().__init__()
        self.count, self.fail_at, self.made = count, fail_at, 0
        self.threads = set()

    def __len__(self):
        return self.count

    def _iterate(self):
        for number in range(self.count):
            if number == self.fail_at:
                raise ValueError("no more")
            self.threads.add(threading.current_thread().name)
            self.made += 1
            yield number

    def _process_batch(self, batch):
        return 10 * batch


class Ahead(AsyncDataLoaderMixin, Numbers):
    pass


def running():
    return [thread for thread in threading.enumerate() if thread.name == "ringlet-loader"]


@pytest.mark.parametrize("size", [0, 1, 64])
def test_every_pass_has_all_batches_in_order(size):
    loader = Ahead(size, 5)
    assert [list(loader) for _ in range(3)] == [[0, 10, 20, 30, 40]] * 3
    assert len(loader) == 5
    assert (loader.threads == {"ringlet-loader"}) == bool(size)
    loader.close_async_loader()
    assert running() == []


def test_no_more_than_the_queue_holds_is_made_ahead():
    loader = Ahead(async_loader_queue_size=2, count=100)
    assert next(iter(loader)) == 0
    loader.close_async_loader()
    assert loader.made <= 4  # one taken, two waiting, one in the thread's hands
    assert running() == []


def test_a_pass_that_was_left_early_does_not_leak_into_the_next():
    loader = Ahead(4, 8)
    for batch in loader:
        if batch == 20:
            break
    assert list(loader) == [10 * number for number in range(8)]


def test_the_thread_of_a_pass_that_is_left_early_ends():
    loader = Ahead(2, 100)
    for batch in loader:
        if batch == 20:
            break
    for thread in running():
        thread.join(60)
    assert running() == []


def test_an_exception_arrives_where_its_batch_would_have():
    loader, seen = Ahead(4, 8, fail_at=3), []
    with pytest.raises(ValueError, match="no more"):
        seen.extend(loader)
    assert seen == [0, 10, 20]


def test_a_queue_below_nothing_is_refused():
    with pytest.raises(ValueError, match="async_loader_queue_size=-1 is below 0"):
        Ahead(-1, 3)


def test_a_loader_without_batches_of_its_own_says_so():
    with pytest.raises(TypeError, match=r"Nothing has to define _iterate\(\)"):
        list(type("Nothing", (BaseDataLoader,), {})())

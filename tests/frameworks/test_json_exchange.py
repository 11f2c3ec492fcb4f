"""What ranks tell each other about themselves: never unpickled, and checked before it is used."""

import json
import os
import pickle
import sys
import time
from pathlib import Path

import cloudpickle
import numpy as np
import pytest

import ringlet
from ringlet.fusion import Request
from ringlet.job import json_exchange, objects
from ringlet.job.process_sets import ProcessSet, add_process_set, global_process_set
from ringlet.job.session import current
from ringlet.job.session import init as start
from ringlet.job.session import shutdown as stop
from ringlet.ring import Mismatch
from ringlet.ring.errors import ProtocolError
from ringlet.ring.transports.local import run_local
from ringlet.ring.wire import framing
from ringlet.shared.rank_comparison import same_digest

TORCH = pytest.importorskip("torch")

pytestmark = pytest.mark.preloaded("torch", whole_end=True)


def refuse(*args, **kwargs):
    raise AssertionError("something was unpickled")


def forbid_pickle(replace):
    """Let nothing be unpickled: call ``replace(module, name, value)`` for all that does.

    But for kernels that Numba finds on the disk.
    """
    import torch._dynamo.aot_compile  # with others that make classes of what is replaced here
    import torch.serialization

    def refusing(original):
        def call(*args, **kwargs):
            if "numba" in Path(sys._getframe(1).f_code.co_filename).parts:
                return original(*args, **kwargs)
            return refuse()

        return call

    for name in ("loads", "load", "Unpickler", "_loads", "_load", "_Unpickler"):
        replace(pickle, name, refusing(getattr(pickle, name)))
    for module in (torch, torch.serialization):
        replace(module, "load", refuse)


def exchange_everything(forbidden=False):
    """Run what exchanges something of the library's own; return what differing ranks are told."""
    os.environ.setdefault("KERAS_BACKEND", "torch")
    import torch

    import ringlet.torch as hvd
    from ringlet.job.process_sets import process_set_ranks
    from ringlet.keras.value_collectives import variables_equal
    from ringlet.shared.model_agreement import agree, common_names

    if not forbidden:
        forbid_pickle(setattr)
    texts = []

    def told(kind, call):
        with pytest.raises(kind) as caught:
            call()
        texts.append(str(caught.value))

    rank = hvd.init(process_sets=[ProcessSet([0]), ProcessSet([1])]).rank
    assert process_set_ranks() == {0: [0, 1], 1: [0], 2: [1]}
    model = torch.nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.fill_(rank)
    assert not hvd.replicas_equal(model.state_dict())
    hvd.broadcast_parameters(model.state_dict(), 1)
    assert hvd.replicas_equal(model.state_dict())
    named = {f"w{rank}": torch.ones(1), "same": torch.ones(1)}
    told(Mismatch, lambda: hvd.broadcast_parameters(named))
    for kind in (torch.optim.SGD, torch.optim.Adam):
        optimizer = kind(model.parameters(), lr=0.5 if rank else 0.25)
        for _ in range(1 + 2 * rank):
            model(torch.full((1, 3), 1.0 + rank)).sum().backward()
            optimizer.step()
        optimizer.param_groups[0]["betas"] = (0.5, 0.75) if rank else (0.0, 0.0)
        optimizer.param_groups[0]["wide"] = torch.float64
        hvd.broadcast_optimizer_state(optimizer, 1)
        group = optimizer.param_groups[0]
        assert (group["lr"], group["betas"], group["wide"]) == (0.5, (0.5, 0.75), torch.float64)
        state = [v for each in optimizer.state.values() for v in each.values() if v is not None]
        assert hvd.replicas_equal({str(i): v for i, v in enumerate(state)})
        assert len(state) == (6 if kind is torch.optim.Adam else 0)
    optimizer.param_groups[0]["hook"] = refuse
    told(hvd.HorovodInternalError, lambda: hvd.broadcast_optimizer_state(optimizer))
    assert variables_equal([torch.ones(2)])
    assert not variables_equal([torch.full((2,), float(rank))])
    agree("things", "agreed", [("a", "1"), ("b", "2")], global_process_set)
    differing = [("a", "1"), ("b", str(rank))]
    told(Mismatch, lambda: agree("things", "agreed", differing, global_process_set))
    other = [("a", "1"), (f"c{rank}", "2")]
    told(Mismatch, lambda: common_names("things", "named", other, global_process_set))
    hvd.barrier()
    hvd.shutdown()
    return texts


def check_texts(texts):
    assert texts[0] == texts[1]
    names, state, differing, named = texts[0]
    assert "'w0' is there on rank(s) 0 but not on rank(s) 1" in names
    assert "rank 0 cannot be broadcast: TypeError: state['param_groups']" in state
    assert "['hook'] is function, which cannot travel" in state
    assert "'b' differs between ranks (rank 0: 0; rank 1: 1)" in differing
    assert "'c0' is there on rank(s) 0 but not on rank(s) 1" in named


def test_nothing_is_unpickled_on_in_process_ranks(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    import ringlet.keras

    forbid_pickle(monkeypatch.setattr)
    check_texts(ringlet.run(exchange_everything, (True,), np=2, transport="local"))


def test_nothing_is_unpickled_between_processes():
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    check_texts(ringlet.run(exchange_everything, np=2, transport="gloo"))


# -- what ranks send that is not expected -------------------------------------------------------


def on_ranks(size, body):
    def rank_main(comm):
        start()
        try:
            return body(current().rank)
        finally:
            stop()

    return run_local(rank_main, size)


def is_list(value):
    return isinstance(value, list)


def complaint(call):
    with pytest.raises(ProtocolError) as caught:
        call()
    return str(caught.value)


def raw(data, name):
    """Send bytes where others send JSON."""
    engine = current().engine
    data = np.frombuffer(data, np.uint8)
    sizes = Request(f"{name}.sizes", "allgather", "uint8", (data.size, 0))
    engine.submit(sizes, np.empty(0, np.uint8)).wait(60)
    engine.submit(Request(name, "allgather", "uint8", data.shape), data).wait(60)


STRANGE = [b"", b"\x80\x04", b"{", b'{"a": 1}', b"[" * 100_000, b"1" * 5000, b"null"]


@pytest.mark.parametrize("data", STRANGE, ids=range(len(STRANGE)))
def test_what_is_not_expected_is_told_with_the_rank_on_every_rank(data):
    def body(rank):
        if rank == 1:
            raw(data, "x")
            return ""
        return complaint(
            lambda: json_exchange.gather([], "x", global_process_set, "a list", is_list)
        )

    first, _, third = on_ranks(3, body)
    assert first == third
    assert first.startswith("x: rank 1 sent ")
    assert "where a list is expected" in first
    assert len(first) < 300


def test_lengths_are_looked_at_before_memory_is_taken():
    def body(rank):
        if rank == 1:
            sizes = Request("x.sizes", "allgather", "uint8", (1 << 60, 0))
            current().engine.submit(sizes, np.empty(0, np.uint8)).wait(60)
            return ""
        return complaint(
            lambda: json_exchange.gather([], "x", global_process_set, "a list", is_list)
        )

    first, _, third = on_ranks(3, body)
    assert first == third
    assert f"x: rank 1 announces {1 << 60} bytes, and at most {json_exchange.LIMIT} are" in first


def test_a_broadcast_is_read_by_its_root_too():
    def body(rank):
        good = json_exchange.broadcast([rank], 1, "y", global_process_set, "a list", is_list)
        return good, complaint(
            lambda: json_exchange.broadcast(
                {"a": rank}, 2, "x", global_process_set, "a list", is_list
            )
        )

    results = on_ranks(3, body)
    assert len({text for _, text in results}) == 1
    assert results[0] == ([1], results[0][1])
    assert "x: rank 2 sent '{\"a\": 2}' where a list is expected" in results[0][1]


def test_no_name_is_taken_any_more_when_a_broadcast_of_several_has_failed():
    """Who tried again at once was told of a duplicate name."""

    def body(rank):
        odd, other = np.zeros(2 + rank, np.uint8), np.full(4, rank, np.uint8)
        together = [([odd, other], ["odd", "other"])]
        apart = [([odd], ["odd"]), ([other], ["other"])]
        for arrays, names in apart if rank else together:
            to = arrays, names, 0, global_process_set
            if "odd" not in names:
                time.sleep(0.2)  # in which the other rank, if it did not wait, has tried again
                json_exchange.broadcast_arrays(*to)
                continue
            with pytest.raises(Mismatch):
                json_exchange.broadcast_arrays(*to)
        json_exchange.broadcast_arrays([other], ["other"], 0, global_process_set)
        return other.tolist()

    assert on_ranks(2, body) == [[0] * 4] * 2


def test_digests_are_alike_or_not_on_every_rank():
    def body(rank):
        same = same_digest(bytes(range(16)), "d", global_process_set)
        other = same_digest(bytes([rank == 2] * 16), "d", global_process_set)
        return same, other

    assert on_ranks(3, body) == [(True, False)] * 3


TREES = [
    {"tensor": "torch.float32", "shape": [-1]},
    {"tensor": "torch.float32", "shape": ["1"]},
    {"tensor": "torch.float32", "shape": 3},
    {"tensor": "os.system", "shape": []},
    {"tensor": "torch.float32"},
    {"dict": [[["a"], 1]]},
    {"dict": 1},
    {"dtype": "torch.load"},
    {"call": "torch.load"},
    {},
    [[{}]],
]


@pytest.mark.parametrize("tree", TREES, ids=json.dumps)
def test_trees_of_states_are_looked_at_before_they_are_used(tree):
    from ringlet.torch.tensors.state_trees import is_tree

    assert not is_tree(tree)
    assert not is_tree({"dict": [["state", tree]]})


def test_a_state_survives_the_journey():
    from ringlet.torch.tensors.state_trees import assembled, dissected, is_tree, rooms

    torch = TORCH
    value = {
        "state": {0: {"step": torch.tensor(3.0), "m": torch.ones(2, 3, dtype=torch.bfloat16)}},
        "groups": [{"lr": 0.1, "betas": (0.5, None), "inf": float("inf"), "on": True}],
        "t": [torch.zeros(0, 4), torch.tensor([1 + 2j]), torch.arange(6).reshape(2, 3).T],
        "np": np.float32(0.5),
        5: torch.int8,
    }
    tree, arrays = dissected(value)
    told = json.loads(json.dumps(tree))
    assert is_tree(told)
    copies = rooms(told)
    for copy, array in zip(copies, arrays, strict=True):
        copy[:] = array
    back = assembled(told, copies)
    assert list(back) == list(value)
    assert back["groups"] == value["groups"]
    assert (back[5], back["np"], type(back["np"])) == (torch.int8, 0.5, float)
    pairs = [*zip(back["state"][0].values(), value["state"][0].values(), strict=True)]
    for now, before in [*pairs, *zip(back["t"], value["t"], strict=True)]:
        assert now.dtype is before.dtype
        assert torch.equal(now, before)
    with pytest.raises(TypeError, match=r"state\['a'\]\[1\] is set, which cannot travel"):
        dissected({"a": [1, {2}]})


def test_a_state_that_one_rank_has_no_room_for_is_refused_on_all(monkeypatch):
    import ringlet.torch as hvd
    from ringlet.torch import functions

    rooms, asked = functions.rooms, []

    def short(tree):
        asked.append(hvd.rank())
        if hvd.rank() == 1 and asked.count(1) == 1:
            raise MemoryError("tensors of 9 bytes, where this machine has 8")
        return rooms(tree)

    def rank_main():
        hvd.init()
        model = TORCH.nn.Linear(3, 2)
        optimizer = TORCH.optim.Adam(model.parameters())
        model(TORCH.ones(1, 3)).sum().backward()
        optimizer.step()
        with pytest.raises(hvd.HorovodInternalError) as told:
            hvd.broadcast_optimizer_state(optimizer)
        hvd.broadcast_optimizer_state(optimizer)
        return str(told.value)

    monkeypatch.setattr(functions, "rooms", short)
    texts = set(ringlet.run(rank_main, np=3, transport="local"))
    assert texts == {
        "the optimizer state of rank 0 has no room on other ranks (rank 1: tensors of 9 bytes, "
        "where this machine has 8)"
    }


def seals_of_a_job(monkeypatch, *members):
    """Return what the ranks of a job seal that calls ``allgather_object`` once in each set."""
    sealed = {}

    def noted(key, name, data, sender=0):
        made = framing.seal(key, name, data, sender)
        sealed.setdefault(name, {})[sender] = made
        return made

    monkeypatch.setattr(objects, "seal", noted)

    def rank_main(comm):
        start()
        sets = [ProcessSet(ranks) for ranks in members]
        for one in sets:
            add_process_set(one)
        for one in (global_process_set, *sets):
            if one.included():
                objects.allgather_object(f"from rank {comm.rank}", process_set=one)
        stop()

    run_local(rank_main, 3)
    return sealed


def test_an_object_of_an_earlier_job_with_the_same_secret_is_refused(monkeypatch):
    monkeypatch.setenv("RINGLET_SECRET", "the same text for every job")
    earlier = seals_of_a_job(monkeypatch)

    def repeat(key, name, data, sender=0):
        return earlier[name][sender]  # whoever is on the way repeats it

    monkeypatch.setattr(objects, "seal", repeat)

    def rank_main(comm):
        start()
        with pytest.raises(ProtocolError, match="what arrived was not made by this job"):
            objects.allgather_object(f"from rank {comm.rank}")
        stop()

    run_local(rank_main, 3)


def test_an_object_of_one_process_set_is_not_taken_for_that_of_another(monkeypatch):
    sealed = seals_of_a_job(monkeypatch, [0, 1], [0, 2])
    assert len(sealed) == 3, list(sealed)

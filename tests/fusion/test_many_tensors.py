"""What declaring tensors costs grows with their number, and no faster: counted, not timed."""

import numpy as np
import pytest
from counted_calls import number_of_calls

from ringlet.compressors import parse
from ringlet.fusion import DuplicateName, Engine, Limits, Request
from ringlet.fusion.negotiation import messages as m
from ringlet.fusion.negotiation.coordinator import Coordinator
from ringlet.fusion.requests.request import dumps
from ringlet.ring.control.opening import open_control
from ringlet.ring.transports.local import run_local


class Counted(str):
    """A name that counts how often it is compared."""

    __slots__ = ()
    comparisons = 0

    def __eq__(self, other):
        Counted.comparisons += 1
        return str.__eq__(self, other)

    __hash__ = str.__hash__


def requests(n, spec="none", name=str):
    return [Request(name(f"layer{i}.weight"), shape=(3, 5), spec=spec) for i in range(n)]


def declare(engine, asked, spec="none"):
    compressor = parse(spec)
    return engine.declare("g", asked, [compressor] * len(asked), [{} for _ in asked])


def on_one_rank(body):
    def rank_main(comm):
        engine = Engine(comm, open_control, Limits())
        try:
            return body(engine)
        finally:
            engine.shutdown()

    return run_local(rank_main, 1)[0]


def test_names_are_not_compared_with_all_others():
    n = 400
    before = Counted.comparisons
    on_one_rank(lambda engine: declare(engine, requests(n, name=Counted)))
    assert Counted.comparisons - before < 20 * n


@pytest.mark.parametrize(("spec", "most"), [("none", 150), ("int8 | ef", 200)])
def test_planning_costs_as_much_for_each_tensor_however_many_there_are(spec, most):
    def cost(n):
        asked = requests(n, spec)
        return on_one_rank(lambda engine: number_of_calls(lambda: declare(engine, asked, spec)))

    cost(10)
    few, many = cost(200), cost(1600)
    assert many < 8.5 * few
    assert many < most * 1600


@pytest.mark.parametrize("turned", [False, True])
def test_comparing_declarations_costs_as_much_for_each_tensor(turned):
    def cost(n):
        asked = [request.to_list() for request in requests(n)]
        coordinator = Coordinator(2)
        mine = m.DECLARE + dumps([0, "g", asked])
        theirs = m.DECLARE + dumps([0, "g", asked[::-1] if turned else asked])
        coordinator.on_message(1, theirs)
        return number_of_calls(lambda: coordinator.on_message(0, mine))

    few, many = cost(200), cost(1600)
    assert many < 8.5 * few
    assert many < 60 * 1600


def test_a_name_that_is_there_twice_is_told():
    def body(engine):
        asked = [*requests(3), requests(2)[1]]
        with pytest.raises(DuplicateName, match=r"declared twice in 'g': 'layer1.weight'"):
            declare(engine, asked)
        return engine.submit(Request("x", shape=(1,)), np.ones(1, np.float32)).wait(60)[0]

    assert on_one_rank(body) == 1.0

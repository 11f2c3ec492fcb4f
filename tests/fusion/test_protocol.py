"""The coordinator's state machine against a plain model: any interleaving, and nothing is lost."""

import pytest
from fuzz_protocol import run
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from protocol import World


class Protocol(RuleBasedStateMachine):
    """Hypothesis chooses the rules, and shrinks what it finds."""

    @initialize(size=st.integers(2, 4), capacity=st.sampled_from([0, 2, 3, 64]))
    def begin(self, size, capacity):
        self.world = World(size, capacity)

    @rule(chosen=st.sampled_from(World.RULES), data=st.data())
    def act(self, chosen, data):
        chosen(self.world, lambda options: data.draw(st.sampled_from(list(options))))

    def teardown(self):
        if hasattr(self, "world"):
            self.world.finish()


def test_every_interleaving_gives_what_the_model_says():
    budget = settings(max_examples=60, stateful_step_count=50)
    run_state_machine_as_test(Protocol, settings=budget)


@pytest.mark.parametrize("seed", [1, 2])
def test_long_random_runs_give_what_the_model_says(seed):
    done, happened = run(seed, 40_000)  # hashes of strings decide too what happens how often
    assert done >= 40_000
    assert min(happened.values()) > 100, happened

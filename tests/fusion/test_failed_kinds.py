"""What a failed step raises depends on what failed, never on the words in which it is told."""

import numpy as np
import pytest
from engines import with_engines

from ringlet.compressors import parse
from ringlet.fusion import CompressionFailed, Request, StepAbandoned

WHY = ["no memory in step five", "no memory in step 3", "x: abandoned: no memory in step 1, left"]


def ones(n):
    return np.ones(n, np.float32)


@pytest.mark.parametrize("why", WHY)
def test_a_step_given_up_in_any_words_is_abandoned(why):
    def body(engine):
        requests = [Request(name, shape=(4,)) for name in "ab"]
        group = engine.declare("g", requests, [parse("none")] * 2, [{}, {}])
        text, threshold = "", group.plan.hash
        group.submit("a", ones(4))
        if engine.rank == 1:
            group.abandon(why)
        else:
            group.submit("b", ones(4))
            with pytest.raises(StepAbandoned) as caught:
                group.wait(60)
            assert type(caught.value) is StepAbandoned
            text = str(caught.value)
        for name in "ab":
            group.submit(name, ones(4))
        group.wait(60)
        assert group.plan.hash == threshold  # nobody planned anew, as for want of memory
        return text

    assert with_engines(2, body)[0] == f"rank 1: abandoned: {why}"


@pytest.mark.parametrize("why", WHY)
@pytest.mark.parametrize("declared", [False, True])
def test_a_compressor_that_fails_in_any_words_has_failed(brittle, reducer, why, declared):
    def fails(ctx):
        if ctx.rank == 1:
            raise ValueError(f": abandoned: : {why}")

    brittle["when"] = fails

    def body(engine):
        step = reducer(engine, 4096, declared)
        with pytest.raises(CompressionFailed, match="rank 1: ") as caught:
            step(ones(4096))
        return str(caught.value)

    texts = with_engines(2, body)
    assert texts[0] == texts[1]
    assert why in texts[0]

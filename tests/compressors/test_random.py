"""Random numbers of a context: reproducible, and independent where they are asked to be."""

import itertools

import numpy as np

from ringlet.compressors import Context, parse
from ringlet.compressors.testing.tools.simulate import simulate


def drawn(shared=False, stream=0, **fields):
    return Context(name="w", seed=7, **fields).rng(shared, stream).standard_normal(2000)


def test_a_stream_is_drawn_again_and_others_are_independent():
    ways = list(itertools.product((False, True), (0, 1, 2), (0, 1), (0, 1)))
    rows = []
    for shared, stream, step, stage in ways:
        numbers = drawn(shared, stream, step=step, stage=1 + stage)
        np.testing.assert_array_equal(numbers, drawn(shared, stream, step=step, stage=1 + stage))
        rows.append(numbers)
    correlations = np.corrcoef(rows) - np.eye(len(rows))
    assert np.abs(correlations).max() < 0.12  # five standard deviations


def test_ranks_share_streams_that_are_shared():
    for stream in (0, 1):
        first, second = (drawn(True, stream, rank=rank) for rank in (0, 1))
        np.testing.assert_array_equal(first, second)
        assert (drawn(False, stream, rank=0) != drawn(False, stream, rank=1)).all()


def test_a_context_goes_on_drawing_the_numbers_that_it_drew():
    """Checkpoints, and ranks of other versions, rely on them."""
    numbers = Context(name="w", seed=7, step=3).rng().integers(0, 1 << 20, 4)
    assert numbers.tolist() == [494370, 829644, 836496, 822205]


def test_factors_begin_with_numbers_of_their_own():
    states = [{}, {}]
    zeros = [np.zeros(64 * 64, np.float32)] * 2  # of which no row is kept, so that draws show
    simulate(parse("acpsgd(rank=4)"), zeros, states, shape=(64, 64))
    left, right = states[0]["left"].reshape(-1), states[0]["right"].reshape(-1)
    assert abs(np.corrcoef(left, right)[0, 1]) < 0.3


def test_a_piece_draws_what_the_whole_tensor_draws_there():
    given = {"name": "w", "seed": 7}
    whole = Context(**given).uniform(30_001)
    for first, n in ((0, 30_001), (1, 30_000), (8191, 2), (8192, 8193), (30_000, 1)):
        piece = Context(**given, offset=first).uniform(n)
        np.testing.assert_array_equal(piece, whole[first : first + n])
        alone = [Context(**given, offset=first + at).uniform(1)[0] for at in range(0, n, 997)]
        np.testing.assert_array_equal(piece[::997], alone)

"""Who counts as frozen in an elastic job while others wait, and who does not."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from ringlet.ring.elastic.signs_of_life import SignsOfLife

SILENCE = 5.0


@pytest.mark.parametrize("listens", [True, False])
def test_nobody_is_silent_while_the_launcher_does_not_listen(listens: bool) -> None:
    """As nobody reads what it prints: then it takes no more from the ranks."""
    late = SimpleNamespace(number=0, here=True, done=False, heard=0.0, host="a", channel=Mock())
    member = SimpleNamespace(rank=0)
    membership = Mock(members=[member], late=lambda: [0], called=list)
    signs = SignsOfLife(membership, SimpleNamespace(ranks=[late]), SILENCE)
    assert list(signs.look(1.0, listens=True)) == []
    late.channel.send.assert_called_once()
    notes = list(signs.look(2.0 + SILENCE, listens))
    assert membership.silent.called == bool(notes) == listens
    if listens:
        return
    assert signs.patience(2.0 + SILENCE) == SILENCE
    late.heard = 3.0 + SILENCE
    assert list(signs.look(3.0 + 2 * SILENCE, listens=True)) == []
    assert not membership.silent.called

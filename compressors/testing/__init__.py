"""The conformance kit: whether a compressor is what it claims to be.

    from ringlet.compressors.testing import parametrize_with_checks

    @parametrize_with_checks(["mine", "mine(level=3) | ef"])
    def test_conformance(compressor, check):
        check(compressor)

``check_compressor("mine")`` runs the same outside pytest, ``ringlet check mine`` on the command
line. Every check is a property, tried on the same examples in every run; a failure shows a small
one, and says in a sentence why it matters to whoever trains with the compressor, and what to do.
"""

from ringlet.compressors.testing.catalogue import all_checks
from ringlet.compressors.testing.runner import check_compressor, parametrize_with_checks
from ringlet.compressors.testing.tools.named_check import CheckFailed
from ringlet.compressors.testing.tools.simulate import simulate

__all__ = [
    "CheckFailed",
    "all_checks",
    "check_compressor",
    "parametrize_with_checks",
    "simulate",
]

"""Which kind of bucket suits its members: by their strategy, their place, and the hosts."""

from __future__ import annotations

from collections.abc import Sequence

from ringlet.compressors import NoCompression
from ringlet.fusion.buckets.bucket import Bucket, CompressedBucket, SumBucket
from ringlet.fusion.buckets.cuda_bucket import DeviceBucket, DeviceSumBucket
from ringlet.fusion.buckets.cuda_two_level import DeviceTwoLevelBucket
from ringlet.fusion.buckets.plain import PlainBucket
from ringlet.fusion.buckets.rounds import RoundsBucket
from ringlet.fusion.buckets.two_level import TwoLevelBucket
from ringlet.fusion.peers import Peers, levels_of
from ringlet.fusion.planning.member import Member


def make_bucket(
    members: Sequence[Member], peers: Peers, hierarchical: bool = True, verify: int = 0
) -> Bucket:
    """Return the bucket that suits its members' common strategy, place, and the hosts they are on.

    Uncompressed members go through two levels only if ``hierarchical``. The bucket has a
    digest of its sums, of one in ``verify`` of their spans.
    """
    bucket = _suitable(members, peers, hierarchical)
    bucket.settle()
    bucket.verify = verify if peers.size > 1 else 0
    return bucket


def _suitable(members: Sequence[Member], peers: Peers, hierarchical: bool) -> Bucket:
    kinds: dict[str, type[Bucket]] = {
        "rounds": RoundsBucket,
        "sum": SumBucket,
        "allgather": CompressedBucket,
        "scatter_reduce": CompressedBucket,
    }
    if isinstance(members[0].compressor, NoCompression):
        return PlainBucket(members, peers.size, hierarchical)
    if members[0].place.ordered:
        kinds |= {"sum": DeviceSumBucket, "allgather": DeviceBucket, "scatter_reduce": DeviceBucket}
    kind = kinds[members[0].strategy]
    levels = levels_of(peers.comm)
    if kind is CompressedBucket and levels is not None:
        return TwoLevelBucket(members, levels)
    fixed = all(member.compressor.traits().fixed_size for member in members)
    if kind is DeviceBucket and levels is not None and fixed:
        return DeviceTwoLevelBucket(members, levels)
    return kind(members, peers.size)

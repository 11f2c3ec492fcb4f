"""The codec protocol: what a compressed collective asks of whoever encodes the tensors.

A codec stands for the tensors of one fusion bucket on one rank. Its values are divided into
``parts``: one part when payloads are gathered whole, one part per rank when the reduction is
scattered. The ring moves opaque bytes; only the codec knows what they mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ringlet.ring.dtypes import Array


class Codec(Protocol):
    """Encodes and decodes the values of one fusion bucket, part by part."""

    @property
    def parts(self) -> int:
        """Into how many parts the values are divided: 1 or the number of ranks."""

    def prepare(self) -> None:
        """Get ready to encode this step's values; sizes may depend on them."""

    def capacity(self, part: int) -> int:
        """Return the most bytes that encoding ``part`` can take, the same on every rank."""

    def encode_into(self, part: int, out: Array) -> int:
        """Encode this rank's values of ``part`` into ``out`` (uint8); return the bytes used."""

    def decode_sum_into(self, part: int, payloads: Sequence[Array]) -> None:
        """Overwrite the output of ``part`` with the scaled sum of ``payloads``, in rank order."""

    def decode_sum_encode(self, part: int, payloads: Sequence[Array], out: Array) -> int:
        """Sum ``payloads`` in rank order, scale, encode the sum into ``out``; return the bytes."""

    def decode_into(self, part: int, payload: Array) -> None:
        """Overwrite the output of ``part`` with what ``payload`` encodes."""

"""What follows a payload on the wire, so that its receiver knows it is the right one, and whole.

A seal is four 64-bit integers, little-endian: the number of the exchange (both sides count), a hash
of the plan that the ranks agreed on, the payload's bytes, and a checksum of everything.
"""

from __future__ import annotations

import enum
import struct

from ringlet.ring.collectives.checksum import checksum
from ringlet.ring.dtypes import Array

_SEAL = struct.Struct("<4Q")
SEAL = _SEAL.size  # bytes


class Fault(enum.IntEnum):
    """What is wrong with a payload; the text completes "a payload ...", or "a sum ..."."""

    NONE = 0
    LENGTH = 1
    SEQUENCE = 2
    PLAN = 3
    CHECKSUM = 4
    FAILED = 5
    UNDECODED = 6
    UNENCODED = 7

    @property
    def text(self) -> str:
        """Describe the fault."""
        return {
            Fault.NONE: "without fault",
            Fault.LENGTH: "whose length differs from the announced one",
            Fault.SEQUENCE: "of another exchange: its sequence number differs",
            Fault.PLAN: "made for another plan: its plan hash differs",
            Fault.CHECKSUM: "that was damaged: its checksum differs",
            Fault.FAILED: "that it could not encode: its codec failed",
            Fault.UNDECODED: "that it could not decode: its codec failed",
            Fault.UNENCODED: "in place of one that it could not encode: its codec failed",
        }[self]


def seal(message: Array, sequence: int, plan: int) -> None:
    """Write the seal of ``message`` (uint8: payload, then room for the seal) to its end."""
    nbytes = message.size - SEAL
    value = checksum(message[:nbytes], sequence, plan)
    _SEAL.pack_into(message.data, nbytes, sequence, plan, nbytes, value)


def inspect(message: Array, sequence: int, plan: int) -> Fault:
    """Return the first fault of a sealed ``message``."""
    nbytes = message.size - SEAL
    if nbytes < 0:
        return Fault.LENGTH
    number, made_for, length, value = _SEAL.unpack_from(message.data, nbytes)
    # A damaged field is damage, not another exchange, so what the fields say is checked as said.
    if value != checksum(message[:nbytes], number, made_for):
        return Fault.CHECKSUM if length == nbytes else Fault.LENGTH
    if length != nbytes:
        return Fault.LENGTH
    if number != sequence:
        return Fault.SEQUENCE
    return Fault.NONE if made_for == plan else Fault.PLAN

"""What is done to a tensor's state between steps: by a loss scale, a new spec, another world size.

A state is what compressors remember of a tensor. Arrays in it may be of any array module.
"""

from ringlet.compressors.states.held_parts import bare
from ringlet.compressors.states.ownership import (
    counts_in_common,
    everyones,
    forget_shared,
    of_gradient,
    owed,
    own,
    reclaim,
    reorder,
    residual_to_rows,
    resize,
    rows_to_residual,
    shared,
    take_over,
    whole_residual,
)
from ringlet.compressors.states.restore import carry_over, fit, merged
from ringlet.compressors.states.units import prescale, rescale

__all__ = [
    "bare",
    "carry_over",
    "counts_in_common",
    "everyones",
    "fit",
    "forget_shared",
    "merged",
    "of_gradient",
    "owed",
    "own",
    "prescale",
    "reclaim",
    "reorder",
    "rescale",
    "residual_to_rows",
    "resize",
    "rows_to_residual",
    "shared",
    "take_over",
    "whole_residual",
]

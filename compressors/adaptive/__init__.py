"""Choosing compressors during training, from values that every rank has, so that all choose alike.

Hand the choice to ``optimizer.set_compression``.
"""

from ringlet.compressors.adaptive.accordion import Accordion
from ringlet.compressors.adaptive.lgreco import assign

__all__ = ["Accordion", "assign"]

"""A griffe extension: docstrings are prose with ``code``, in which stars are stars."""

from __future__ import annotations

from typing import Any

from griffe import Extension, Object
from reference import plain


class PlainStars(Extension):
    """Leads every docstring through ``plain``."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Change the docstring of ``obj``, if it has one."""
        if obj.docstring is not None:
            obj.docstring.value = plain(obj.docstring.value)

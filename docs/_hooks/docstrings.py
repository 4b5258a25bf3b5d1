"""Reads docstrings for the reference: jaxmp writes `Example:`, griffe expects `Examples:`."""

import re

import griffe


class Examples(griffe.Extension):
    """Renames the section."""

    def on_object(self, *, obj: griffe.Object, **kwargs) -> None:
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)

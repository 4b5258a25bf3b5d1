"""How docstrings are read for the reference: our `Example:` is what griffe calls `Examples:`, lines of `>>>`."""

import re

import griffe


class Examples(griffe.Extension):
    """Renames the section."""

    def on_object(self, *, obj: griffe.Object, **kwargs) -> None:
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)

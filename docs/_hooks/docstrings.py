"""Reads docstrings for the reference: jaxmp writes `Example:`, griffe expects `Examples:`.

And it shows functions that a guard wraps as they are where they are written, with signature and docstring.
"""

import re

import griffe

from names import exports_of, namespaces


class Examples(griffe.Extension):
    """Renames the section."""

    def on_object(self, *, obj: griffe.Object, **kwargs) -> None:
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)

    def on_package(self, *, pkg: griffe.Module, **kwargs) -> None:
        faces = ["jaxmp", *namespaces()] if pkg.name == "jaxmp" else []
        for face in (face for face in faces if face.startswith("jaxmp")):
            found = pkg if face == "jaxmp" else pkg[face.removeprefix("jaxmp.")]
            for name, origin in exports_of(face).items():
                member = found.members.get(name)
                if member is not None and member.is_alias and member.target_path != f"{origin}.{name}":
                    found.set_member(name, griffe.Alias(name, f"{origin}.{name}"))

"""Gives all warnings of jaxmp: at a line of the user's code, with the name of an entry in docs/warnings.md."""

import sys
import types
import warnings

PAGE = "docs/warnings.md"

# Packages whose functions stand between the user's line and jaxmp: the user did not write them.
_BETWEEN = frozenset(
    "jaxmp pallas_kernels jax jaxlib flax optax orbax equinox haiku jaxtyping numpy "
    "concurrent contextlib functools runpy threading".split()
)


def warn(entry: str, message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the innermost line that is the user's, as Python does: one text once for a line.

    Says where the cause, the fix and a filter against this warning are described.

    Args:
      entry: the heading in docs/warnings.md. Filters can name it, as the message ends with it.
      message: the rule, what was got, the path and the fix.
      category: of the warning.
    """
    frame = _user_frame(sys._getframe(1))
    names = frame.f_globals
    warnings.warn_explicit(
        f"{message} [{PAGE}#{entry}]",
        category,
        filename=frame.f_code.co_filename,
        lineno=frame.f_lineno,
        module=names.get("__name__") or "<unknown>",
        registry=names.setdefault("__warningregistry__", {}),
    )


def _user_frame(caller: types.FrameType) -> types.FrameType:
    """The innermost frame outside of `_BETWEEN`; without one, as in a thread that jax started, the caller's."""
    frame: types.FrameType | None = caller
    while frame is not None:
        package = str(frame.f_globals.get("__name__")).partition(".")[0]
        # The lines of a doctest have the names of the module that they document.
        if package not in _BETWEEN or frame.f_code.co_filename.startswith("<doctest "):
            return frame
        frame = frame.f_back
    return caller


def folders_between() -> tuple[str, ...]:
    """What the names of files begin with that the user did not write: those of the packages that are imported now."""
    files = [file for name in _BETWEEN if (file := getattr(sys.modules.get(name), "__file__", None))]
    folders = (file.removesuffix("__init__.py") for file in files)
    return ("<frozen ", *folders)

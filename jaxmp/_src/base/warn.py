"""The one way in which jaxmp warns: each message names its entry in docs/warnings.md."""

import warnings

PAGE = "docs/warnings.md"


def warn(entry: str, message: str, category: type[Warning] = UserWarning, *, stacklevel: int = 1) -> None:
    """Warns, and says where the cause, the fix and a filter against this warning are described.

    Args:
      entry: the heading in docs/warnings.md. Filters can name it, as the message ends with it.
      message: the rule, what was got, the path and the fix.
      category: of the warning.
      stacklevel: as for `warnings.warn`, where 1 is the function that calls this one.
    """
    warnings.warn(f"{message} [{PAGE}#{entry}]", category, stacklevel=stacklevel + 1)

"""Packages that only some users need: imported where they are used, with an error that says how to install them."""

import importlib
from typing import Any


def load(module: str, *, extra: str) -> Any:
    """A module of an optional package; the ImportError names `extra`, the extra of jaxmp that installs the package."""
    try:
        return importlib.import_module(module)
    except ImportError as e:
        package = module.partition(".")[0]
        raise ImportError(
            f"this needs the package {package}, which is not installed ({e}). Run pip install 'jaxmp[{extra}]'."
        ) from e

"""Functions by name, as a command line or a file names them: `module:function` or `folder/file.py:function`."""

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def function_of(name: str) -> Callable[..., Any]:
    """The function `module:name` or `folder/file.py:name`; `module:class.name` for one inside a class.

    A file is run as a module of its name: code that should run only as a script stands under
    `if __name__ == "__main__"`.

    Raises:
      ValueError: there is no such function.
    """
    module_name, _, path = name.rpartition(":")
    if not module_name or module_name == "__main__":
        raise ValueError(f"{name!r} cannot be imported. Name a function as module:function or file.py:function")
    try:
        found: Any = _module_of_file(Path(module_name)) if module_name.endswith(".py") else None
        found = found or importlib.import_module(module_name)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, FileNotFoundError) as e:
        raise ValueError(f"{name!r} is not there: {e}") from e
    return found


def _module_of_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None  # because its name ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent))  # as Python does for a script
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]
        raise
    return module

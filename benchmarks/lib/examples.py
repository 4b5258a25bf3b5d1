"""The model that examples/train.py trains, for benchmarks that measure it."""

import importlib.util
import sys
from types import ModuleType

from benchmarks.lib.tables import ROOT


def load(name: str) -> ModuleType:
    """A script of examples/ as a module, under its bare name."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]  # as Python's own import does
        raise
    return module


report = load("report")  # train.py imports it by its bare name
train = load("train")

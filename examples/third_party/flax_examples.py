"""Modules of flax's examples, which its source distribution has and its wheel has not, executed as they are."""

import importlib.metadata
import sys
import tarfile
import types
from pathlib import Path
from unittest import mock

HERE = Path(__file__).resolve().parent
COMMAND = "pip download --no-deps --no-binary flax flax==VERSION -d examples/third_party"
# Of these the examples take only data, settings and logs.
NOT_NEEDED = ("absl", "flax.metrics.tensorboard", "ml_collections", "tensorflow", "tensorflow_datasets")


def archive() -> Path:
    """The source distribution of the installed flax, beside this file.

    Raises:
      FileNotFoundError: it was not downloaded; the message has the command.
    """
    version = importlib.metadata.version("flax")
    path = HERE / f"flax-{version}.tar.gz"
    if not path.exists():
        raise FileNotFoundError(
            f"flax's examples are in its source distribution, and {path} does not exist. Download it with\n"
            f"  {COMMAND.replace('VERSION', version)}"
        )
    return path


def load(name: str) -> types.ModuleType:
    """Executes `examples/<name>` of the archive, unchanged, with mocks for what it takes data and settings from."""
    path = archive()
    with tarfile.open(path) as files:
        source = files.extractfile(f"{path.name.removesuffix('.tar.gz')}/examples/{name}").read()
    module = types.ModuleType("flax_examples." + name.removesuffix(".py").replace("/", "."))
    with mock.patch.dict(sys.modules, {needed: mock.MagicMock() for needed in NOT_NEEDED} | {module.__name__: module}):
        exec(compile(source, f"{path}:{name}", "exec"), module.__dict__)
    return module

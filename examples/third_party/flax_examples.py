"""Modules of flax's examples, which its source distribution has and its wheel has not, imported as they are."""

import importlib
import importlib.metadata
import sys
import tarfile
import tempfile
import types
from pathlib import Path
from unittest import mock

import flax.io  # noqa: F401 - it asks whether tensorflow is there, so before the mocks

HERE = Path(__file__).resolve().parent
COMMAND = "pip download --no-deps --no-binary flax flax==VERSION -d examples/third_party"
# Of these the examples take only data, settings, games and logs.
NOT_NEEDED = (
    "PIL",
    "absl",
    "clu",
    "env_utils",
    "flax.metrics.tensorboard",
    "ml_collections",
    "tensorflow",
    "tensorflow_datasets",
    "test_episodes",
)


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
    """Imports `examples/<name>` of the archive, unchanged, with mocks for what it takes data and settings from.

    The files beside it in the archive are what it imports by their names.
    """
    folder, _, stem = name.removesuffix(".py").rpartition("/")
    before = set(sys.modules)
    with tempfile.TemporaryDirectory() as place, mock.patch.object(sys, "path", [place, *sys.path]):
        _unpack(folder, Path(place))
        mocks = {needed: mock.MagicMock() for needed in NOT_NEEDED}
        with mock.patch.dict(sys.modules, mocks):
            for beside in Path(place).glob("*.py"):
                if beside.stem not in mocks:
                    sys.modules.pop(beside.stem, None)
            importlib.invalidate_caches()
            module = importlib.import_module(stem)
            installed = {
                k: m for k, m in sys.modules.items() if k not in before and not _is_in(m, place) and k not in mocks
            }
    sys.modules.update(installed)
    return module


def _unpack(folder: str, place: Path) -> None:
    path = archive()
    start = f"{path.name.removesuffix('.tar.gz')}/examples/{folder}/"
    with tarfile.open(path) as files:
        for entry in files:
            beside = entry.name.removeprefix(start)
            if entry.name.startswith(start) and beside.endswith(".py") and "/" not in beside:
                (place / beside).write_bytes(files.extractfile(entry).read())


def _is_in(module: types.ModuleType, place: str) -> bool:
    return str(getattr(module, "__file__", None) or "").startswith(place)

"""Numbered folders in a directory, each there as a whole or not at all.

A folder is written under a hidden name and renamed when all of it is on the disk: a rename is one step. What a job left
that was killed while it wrote is removed by the next that writes there, on the same machine.
"""

import contextlib
import os
import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

_DIGITS = 6


class NewFolder:
    """A folder that is being written.

    Attributes:
      half: where it is written.
      path: where it lies when it is whole.
    """

    def __init__(self, half: Path):
        self.half = half
        self.path = half


def folders_in(root: Path, suffix: str | None = None) -> list[Path]:
    """The whole folders in a directory, in their order; with `suffix`, those whose number it follows."""
    found = root.iterdir() if root.is_dir() else ()
    folders = sorted(path for path in found if path.name[:_DIGITS].isdigit() and path.is_dir())
    return [path for path in folders if suffix is None or path.name[_DIGITS:] == suffix]


@contextlib.contextmanager
def new_folder(root: Path, suffix: str = "") -> Iterator[NewFolder]:
    """The next folder of a directory, which gets its name when the block ends without an error.

    Args:
      root: the directory; made if it is not there.
      suffix: follows the number, and has numbers of its own.
    """
    root.mkdir(parents=True, exist_ok=True)
    _remove_halves(root)
    half = root / f".{platform.node()}-{os.getpid()}.half"
    half.mkdir()
    folder = NewFolder(half)
    try:
        yield folder
        for file in half.iterdir():
            with open(file, "rb") as f:
                os.fsync(f.fileno())
        folder.path = _named(half, root, suffix)
    finally:
        shutil.rmtree(half, ignore_errors=True)


def _named(half: Path, root: Path, suffix: str) -> Path:
    while True:
        numbers = [int(path.name[:_DIGITS]) for path in folders_in(root, suffix)]
        path = root / f"{max(numbers, default=-1) + 1:0{_DIGITS}d}{suffix}"
        try:
            return half.rename(path)
        except OSError:
            if not path.exists():  # else another job took the name in between
                raise


def _remove_halves(root: Path) -> None:
    for half in root.glob(f".{platform.node()}-*.half"):
        process = half.name.removesuffix(".half").rpartition("-")[2]
        if process == str(os.getpid()) or not _is_alive(int(process)):
            shutil.rmtree(half, ignore_errors=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # of somebody else
    return True

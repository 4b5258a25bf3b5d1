"""Numbered folders in a directory, each complete or absent.

A folder is written under a hidden name and renamed when all of it is on the disk: a rename is atomic. If a job is
killed while it writes, the next job that writes there from the same machine removes the incomplete folder.
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
      path: its path when it is complete.
    """

    def __init__(self, half: Path):
        self.half = half
        self.path = half


def folders_in(root: Path, suffix: str | None = None) -> list[Path]:
    """The complete folders in a directory, in order; with `suffix`, those that have it after their number."""
    found = root.iterdir() if root.is_dir() else ()
    folders = sorted(path for path in found if path.name[:_DIGITS].isdigit() and path.is_dir())
    return [path for path in folders if suffix is None or path.name[_DIGITS:] == suffix]


@contextlib.contextmanager
def new_folder(root: Path, suffix: str = "") -> Iterator[NewFolder]:
    """The next folder of a directory, which is made if missing; it gets its name if the block ends without an error.

    Folders of each `suffix` have their own numbers.
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
        return True  # of another user
    return True

"""One writer for a directory of steps, and steps that are on the disk before they get their name.

Orbax writes a step into a folder with a temporary name, renames it at the end, and removes the temporary folders of
killed processes. Two processes that save into one directory would remove the folders of each other. Also, a rename may
reach the disk before the files do: after a power failure, the step would exist with empty files.
"""

import contextlib
import functools
import os
import pathlib
from typing import Any

import jax

from jaxmp._src.base import optional

try:
    import fcntl
except ImportError:  # no such locks on this system: writers are not kept apart
    fcntl = None

_LOCK = ".writer"


@functools.cache
def manager_class() -> Any:
    """A `CheckpointManager` whose first save takes the lock of its directory, and whose `close` gives it back."""
    ocp = optional.load("orbax.checkpoint", extra="checkpoint")

    class Manager(ocp.CheckpointManager):
        """Orbax's manager, as the only process that writes into its directory."""

        _lock: int | None = None
        _is_closed = False

        def hold(self) -> None:
            """Takes the lock of the directory; a ValueError if another process has it, or if this manager is closed."""
            if self._is_closed:
                raise ValueError(
                    f"a manager saves until it is closed; the one of {self.directory} is closed: its `with` has ended, "
                    f"or close() was called. Keep one manager open for the whole run, or make a new one with "
                    f"jaxmp.checkpoint.manager."
                )
            if self._lock is None and jax.process_index() == 0 and fcntl is not None:
                self._lock = _lock(pathlib.Path(self.directory))

        def close(self) -> None:
            self._is_closed = True
            try:
                super().close()
            finally:
                lock, self._lock = self._lock, None
                if lock is not None:
                    os.close(lock)

    return Manager


def _lock(directory: pathlib.Path) -> int:
    """The open file of a lock that lasts until the file is closed, or the process ends in whatever way."""
    assert fcntl is not None
    file = os.open(directory / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        # A lock of the process: a second manager of this one gets it too.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as e:
        other = os.read(file, 100).decode(errors="replace").strip()
        os.close(file)
        raise ValueError(
            f"one process at a time may save into a directory; {directory} has another writer ({other}). End it, or "
            f"save into a directory of this run's own."
        ) from e
    except OSError:  # a file system without locks
        return file
    os.ftruncate(file, 0)
    os.write(file, f"process {os.getpid()} on {os.uname().nodename}".encode())
    return file


@functools.cache
def durable_path() -> Any:
    """Orbax's temporary folder, which it renames at the end, with all that is in it brought to the disk before."""
    atomicity = optional.load("orbax.checkpoint.path", extra="checkpoint").atomicity

    class DurablePath(atomicity.AtomicRenameTemporaryPath):
        """A folder that is renamed when its files are on the disk."""

        async def finalize(self) -> None:
            folder = pathlib.Path(self.get())
            for path in (*folder.rglob("*"), folder):
                sync(path)
            await super().finalize()
            sync(pathlib.Path(self.get_final()).parent)

    return DurablePath


def sync(path: pathlib.Path) -> None:
    """Brings a file, or the names in a folder, to the disk."""
    with contextlib.suppress(FileNotFoundError):
        file = os.open(path, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)

"""One writer for a directory of steps, each of which is there as a whole or not at all, and a save that ends.

Orbax writes a step into a folder with a temporary name, and renames it at the end. The writer of a directory removes
what killed processes left there under such names, so two processes that save into one directory would remove the
folders of each other. Also, a rename may reach the disk before the files do: after a power failure, the step would
exist with empty files. A step that is deleted is renamed, too, before its files go: else a process that is killed
meanwhile would leave a step of which a part is missing, and after a roll-back it would be the newest. A save runs in
the background: a program that ends while it runs, and has not closed its manager, would lose the step.
"""

import atexit
import contextlib
import functools
import os
import pathlib
import shutil
import sys
import threading
from typing import Any, ClassVar

import jax

from jaxmp._src.base import optional
from jaxmp._src.checkpoint import places

try:
    import fcntl
except ImportError:  # no such locks on this system: writers are not kept apart
    fcntl = None

_LOCK = ".writer"
UNFINISHED = ".orbax-checkpoint-tmp"  # how Orbax names the folder of a step until it is complete
DELETED = ".deleted"  # the folder in a directory of steps for those that are deleted, until their files are
# Python 3.12.0 to 3.12.2 starts no thread from the end of the main thread on (gh-113964), so no save can end there.
_SAVES_END_LATE = not (3, 12) <= sys.version_info < (3, 12, 3)


@functools.cache
def manager_class() -> Any:
    """A `CheckpointManager` whose first save or deletion takes the lock of its directory; `close` gives it back.

    If nobody calls `close`, the end of the program does; or, where Python cannot, each save outside of `with` waits.
    """
    ocp = optional.load("orbax.checkpoint", extra="checkpoint")

    class Manager(ocp.CheckpointManager):
        """Orbax's manager, as the only process that writes into its directory."""

        _reads_only = False
        _lock: "_Lock | None" = None
        _is_closed = False
        _is_in_with = False
        _until_closed: list[Any] | None = None  # the manager itself, for the end of the program

        def __init__(self, *args: Any, options: Any = None, **kwargs: Any) -> None:
            self._reads_only = options is not None and options.read_only
            super().__init__(*args, options=options, **kwargs)

        def hold(self) -> None:
            """Takes the lock of the directory; a ValueError if another process has it, or if nothing can be saved."""
            if self._reads_only:
                raise ValueError(
                    f"a manager with read_only=True neither saves nor deletes; got a save or a deletion in "
                    f"{self.directory}. Make the manager of the run that writes without read_only=."
                )
            if not threading.main_thread().is_alive():
                raise ValueError(
                    f"steps are saved while the main thread runs, as Python ends the threads of Orbax with it; got a "
                    f"save into {self.directory} from a thread that runs on. Join the thread in the main one."
                )
            if self._is_closed:
                raise ValueError(
                    f"a manager saves until it is closed; the one of {self.directory} is closed: its `with` has ended, "
                    f"or close() was called. Keep one manager open for the whole run, or make a new one with "
                    f"jaxmp.checkpoint.manager."
                )
            if self._until_closed is None:
                self._until_closed = [self]
                if _SAVES_END_LATE:
                    _at_exit(functools.partial(_finish, self._until_closed, os.getpid()))
            folder = places.folder(self.directory)
            if self._lock is None and jax.process_index() == 0 and places.is_local(folder):
                self._lock = _Lock.of(folder)

        def save(self, *args: Any, **kwargs: Any) -> bool:
            self.hold()
            is_saved: bool = super().save(*args, **kwargs)
            if not (_SAVES_END_LATE or self._is_in_with or self._until_closed is None):
                self.wait_until_finished()
            return is_saved

        def wait_until_finished(self) -> None:
            super().wait_until_finished()
            self._empty()

        def delete(self, step: int) -> None:
            self.hold()
            super().delete(step)
            self._empty()

        def _empty(self) -> None:
            """Deletes the files of the steps that Orbax has put aside since."""
            if self._lock is not None:  # else another process may be putting one aside
                shutil.rmtree(places.folder(self.directory) / DELETED, ignore_errors=True)

        def __enter__(self) -> Any:
            self._is_in_with = True
            return super().__enter__()

        def close(self) -> None:
            self._is_closed = True
            if self._until_closed is not None:
                self._until_closed.clear()
            try:
                super().close()
            finally:
                lock, self._lock = self._lock, None
                if lock is not None:
                    lock.release()

    return Manager


def _at_exit(function: Any) -> None:
    """Calls `function` at the end of the program, however it ends, but for signals and `os._exit`."""
    # `atexit` is too late: before its functions Python ends the pools of threads, which Orbax needs to finish a save. A
    # function that is registered with `threading` comes before that; Python has no public name for it.
    getattr(threading, "_register_atexit", atexit.register)(function)


def _finish(managers: list[Any], process: int) -> None:
    """Closes the managers that nobody closed. An error is shown as one that nobody caught; others go on."""
    if os.getpid() != process:  # a fork has none of the threads that save
        return
    for manager in list(managers):
        try:
            manager.close()
        except Exception as e:
            error = ValueError(
                f"a save must end before its program does; the last one into {manager.directory} failed, and its step "
                f"is lost: {e}. A manager that is closed (`with`, or close()) raises this where the program can see it."
            )
            error.__cause__ = e
            sys.excepthook(ValueError, error, error.__traceback__)


class _Lock:
    """The lock of a directory, which all managers of this process share; it ends with the last, or with the process.

    It is a lock of the open file (`flock`), not of the process: a lock of the process would end when anything in the
    process closes the file, such as a copy of the directory.
    """

    # By the file of the lock. The managers of a process find each other here, as the lock is one for all of them.
    _held: ClassVar[dict[tuple[int, int], "_Lock"]] = {}

    def __init__(self, file: int | None) -> None:
        self._file, self._holders = file, 0

    @classmethod
    def of(cls, folder: pathlib.Path) -> "_Lock":
        """The lock of a folder, for one more manager; a ValueError if another process has it."""
        lock = None
        with contextlib.suppress(FileNotFoundError):
            lock = cls._held.get(_identity(os.stat(folder / _LOCK)))
        if lock is None:
            lock = cls(_locked(folder))
            if lock._file is not None:
                cls._held[_identity(os.fstat(lock._file))] = lock
                for left in (*folder.glob(f"*{UNFINISHED}"), folder / DELETED):
                    shutil.rmtree(left, ignore_errors=True)
        lock._holders += 1
        return lock

    def release(self) -> None:
        """Gives the lock back for one manager."""
        self._holders -= 1
        if not self._holders and self._file is not None:
            del self._held[_identity(os.fstat(self._file))]
            os.close(self._file)

    @classmethod
    def forget(cls) -> None:
        """Leaves all locks to the parent of this process, which has just been forked: else they would outlive it."""
        for lock in cls._held.values():
            assert lock._file is not None
            os.close(lock._file)
            lock._file = None
        cls._held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_Lock.forget)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _locked(folder: pathlib.Path) -> int | None:
    """The open file of the lock; None where there are no such locks. A ValueError if another process has it."""
    if fcntl is None:
        return None
    file = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as e:
        other = os.read(file, 100).decode(errors="replace").strip()
        os.close(file)
        raise ValueError(
            f"one process at a time may save into a directory; {folder} has another writer ({other}). End it, or "
            f"save into a directory of this run's own."
        ) from e
    except OSError:  # a file system without locks
        os.close(file)
        return None
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

"""What a long call is doing: one line on a terminal, which is gone at the end. Logs and notebooks get nothing."""

import shutil
import sys
import threading
import time
import types
from typing import Any

_FIRST = 1.0  # seconds before the line is shown: a short call shows none
_EVERY = 1.0


class Progress:
    """A line on stderr with a task, its seconds, and what `say` said last; a thread keeps the seconds moving.

    Example:
      >>> with Progress("saving") as line:  # stderr is no terminal here: nothing is shown
      ...     for n in range(3):
      ...         line.say(f"{n} of 3 tensors")
    """

    def __init__(self, task: str):
        self._task, self._what, self._shown = task, "", 0
        self._start = time.perf_counter()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "Progress":
        if sys.stderr is not None and sys.stderr.isatty():
            self._thread = threading.Thread(target=self._keep_showing, args=(sys.stderr,), daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exception: type[BaseException] | BaseException | types.TracebackType | None) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def say(self, what: str) -> None:
        """What is done now."""
        self._what = what

    def _keep_showing(self, stream: Any) -> None:
        wait = _FIRST
        while not self._over.wait(wait):
            seconds = time.perf_counter() - self._start
            self._show(stream, f"{self._task}, {seconds:.0f} s: {self._what}")
            wait = _EVERY
        if self._shown:
            self._show(stream, "")
            stream.write("\r")
            stream.flush()

    def _show(self, stream: Any, text: str) -> None:
        text = text[: shutil.get_terminal_size().columns - 1]  # a longer line would not be overwritten
        stream.write("\r" + text.ljust(self._shown))
        stream.flush()
        self._shown = len(text)

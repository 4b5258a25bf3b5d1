"""Calls that work in tasks of asyncio: one error in place of those that Python shows, one for each task."""

import gc
import logging
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any


def first_error(call: Callable[[], Any]) -> tuple[Any, str | None]:
    """(`call()`, None); or (None, its error in one line), and the errors of its other tasks are not shown."""
    log, hooks = logging.getLogger("asyncio"), (sys.unraisablehook, sys.excepthook)
    is_other = lambda entry: not entry.getMessage().startswith("Task exception was never retrieved")  # noqa: E731
    log.addFilter(is_other)
    sys.unraisablehook = sys.excepthook = lambda *_: None
    try:
        with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
            try:
                return call(), None
            except Exception as e:
                why = f"{type(e).__name__}: {str(e).partition(chr(10))[0][:300]}"
            gc.collect()  # the tasks that failed are freed here,
            time.sleep(0.2)  # and those that were under way end
            return None, why
    finally:
        log.removeFilter(is_other)
        sys.unraisablehook, sys.excepthook = hooks

"""The record of one section: a JSON file that is written after every item, so that a fault costs one item.

An item is a test, or a program that is timed. Its state is one of

    passed      it ended well
    left out    it cannot run here, which is no failure; the reason is its text
    no time     the section's time was over; a second run measures it
    failed      an error, with its traceback
    crashed, hung, killed      the process died in it: by a fault, by the time limit, or by a signal from outside

This module needs Python alone: the driver reads records where jax does not work.
"""

import faulthandler
import json
import os
import time
from pathlib import Path
from typing import Any

PASSED, LEFT_OUT, NO_TIME, FAILED = "passed", "left out", "no time", "failed"
CRASHED, HUNG, KILLED, MISSING = "crashed", "hung", "killed", "missing"
BAD = (FAILED, CRASHED, HUNG, KILLED)
TEXT = 4000  # characters that are kept of a traceback or of a process's output


class Record:
    """What is known of one section.

    Attributes:
      data: the content of the file: "section", "ended" (whether the section came to its end), "current" (the item that
        runs), "error" (of the section as a whole; empty if there is none), "missing" (the package that it needs),
        "seconds", "items" by name, "rows", and what the driver adds.
    """

    def __init__(self, path: Path | None, name: str = "", *, limit: float = 0.0):
        """`path`: the file, or None to keep all in memory; `limit`: seconds for an item, 0 for none."""
        self.path, self.limit = path, limit
        self.data: dict[str, Any] = {"section": name, "ended": False, "current": None, "error": "", "missing": ""}
        self.data |= {"seconds": 0.0, "items": {}, "rows": []}
        if path is not None and path.exists():
            self.data |= json.loads(path.read_text())
        self._begun = time.monotonic()

    @property
    def items(self) -> dict[str, dict[str, Any]]:
        return self.data["items"]

    @property
    def rows(self) -> list[dict[str, Any]]:
        return self.data["rows"]

    def begin(self, item: str) -> None:
        """Notes that `item` runs. A process that is still in it when its time is over ends with a traceback."""
        self.data["current"] = item
        self._begun = time.monotonic()
        if self.limit:
            faulthandler.dump_traceback_later(self.limit, exit=True)
        self.save()

    def end(self, item: str, state: str = PASSED, text: str = "") -> None:
        """Notes how `item` ended. While another item runs, that one goes on."""
        seconds = 0.0
        if self.data["current"] == item:
            faulthandler.cancel_dump_traceback_later()
            seconds, self.data["current"] = round(time.monotonic() - self._begun, 2), None
        self.items[item] = {"state": state, "seconds": seconds, "text": text[-TEXT:]}
        self.save()

    def save(self) -> None:
        """Writes the file, in one step: a process that dies here leaves the old one."""
        if self.path is not None:
            beside = self.path.with_suffix(".part")
            beside.write_text(json.dumps(self.data, indent=1) + "\n")
            os.replace(beside, self.path)

    def state(self) -> str:
        """The section in one word: "passed", "failed", "missing", "no time", or "" if it never ran."""
        states = {item["state"] for item in self.items.values()}
        if self.data["missing"]:
            return MISSING
        if self.data["error"] or states & set(BAD):
            return FAILED
        if self.data["ended"]:
            return NO_TIME if NO_TIME in states else PASSED
        return NO_TIME if states else ""

    def counts(self) -> dict[str, int]:
        """The number of items in each state."""
        found: dict[str, int] = {}
        for item in self.items.values():
            found[item["state"]] = found.get(item["state"], 0) + 1
        return found

    def forget_what_is_to_run_again(self) -> None:
        """Keeps the items that passed and their rows: what a second run need not repeat.

        A program that did not pass, "what, variant", is timed beside the others of "what" again.
        """
        again = [name for name, item in self.items.items() if item["state"] != PASSED]
        again += [name for name in self.items if any(other.startswith(f"{name}, ") for other in again)]
        for name in set(again):
            del self.items[name]
        self.data["rows"] = [row for row in self.rows if row["what"] not in again]
        self.data |= {"ended": False, "current": None, "error": "", "missing": ""}

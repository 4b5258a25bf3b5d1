"""The record of a run: one file of JSON lines, each written when it is known, so that a kill loses none before it."""

# The driver reads records where jax does not work: this needs Python alone. A line is one of
#
#     {"run": {...}, "again": [...]}                      a run begins: on what, with which code; sections to forget
#     {"section": ..., "item": ..., "state": "runs"}      an item begins: a test, or a program that is timed
#     {"section": ..., "item": ..., "state": ..., "seconds": ..., "text": ..., "row": {...} or null}      it ended
#     {"section": ..., "ended": ..., ...}                 fields of the section as a whole
#
# Where a run begins, sections that did not pass keep their items that passed; the others are to run again. A last line
# that is not whole (its writer was killed) counts as not written.

import faulthandler
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

# Of an item: it has not ended; ended well; cannot run here, which is no failure; is left to a second run; an error
RUNS, PASSED, LEFT_OUT, NO_TIME, FAILED = "runs", "passed", "left out", "no time", "failed"
CRASHED, HUNG, KILLED = "crashed", "hung", "killed"  # the process died in it: by a fault, its time limit, a signal
MISSING = "missing"  # of a section: a package
BAD = (FAILED, CRASHED, HUNG, KILLED)
TEXT = 4000  # characters that are kept of a traceback or of a process's output


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file that are whole; none without the file."""
    if path.exists():
        for text in path.read_bytes().split(b"\n"):
            try:
                line = json.loads(text)
            except ValueError:
                continue
            if isinstance(line, dict):
                yield line


def append(path: Path, line: Mapping[str, Any]) -> None:
    """Adds a line, in one write; behind a line that is not whole it begins a new one."""
    with path.open("ab+") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 1, 0))
        start = b"" if file.read(1) in (b"", b"\n") else b"\n"
        file.write(start + json.dumps(line).encode() + b"\n")


def run_of(path: Path) -> dict[str, Any]:
    """On what the last run was, and with which code; empty without one."""
    last: dict[str, Any] = {}
    for line in lines(path):
        last = line.get("run", last)
    return last


def sources_of(path: Path) -> dict[str, str]:
    """The code that measured each section, as `versions.source` says it."""
    sources, source = {}, ""
    for line in lines(path):
        source = line.get("run", {}).get("source", source)
        if "item" in line:
            sources[line["section"]] = source
    return sources


class Record:
    """What a file says of one section.

    Attributes:
      items: by name: "state", "seconds", "text", "row".
      about: "ended" (whether the section came to its end), "error" (of the section as a whole; empty if there is none),
        "missing" (the package that it needs), "seconds".
    """

    def __init__(self, path: Path | None, section: str, *, limit: float = 0.0):
        """`path`: the file, or None to keep all in memory; `limit`: seconds for an item, 0 for none."""
        self.path, self.section, self.limit = path, section, limit
        self._begun = time.monotonic()
        self._forget_all()
        for line in lines(path) if path else ():
            self._read(line)

    def _forget_all(self) -> None:
        self.items: dict[str, dict[str, Any]] = {}
        self.about: dict[str, Any] = {"ended": False, "error": "", "missing": "", "seconds": 0.0}

    def _read(self, line: dict[str, Any]) -> None:
        if "run" in line:
            if self.section in line.get("again", ()):
                self._forget_all()
            elif self.state() != PASSED:
                self.items = {name: item for name, item in self.items.items() if item["state"] == PASSED}
                self.about |= {"ended": False, "error": "", "missing": ""}
        elif line.get("section") != self.section:
            pass
        elif "item" in line:
            self.items[line["item"]] = {"seconds": 0.0, "text": "", "row": None, **line}
        else:
            self.about |= {name: value for name, value in line.items() if name != "section"}

    def _add(self, line: dict[str, Any]) -> None:
        line = {"section": self.section, **line}
        self._read(line)
        if self.path is not None:
            append(self.path, line)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of all items that have one."""
        return [item["row"] for item in self.items.values() if item["row"]]

    @property
    def current(self) -> str | None:
        """The item that runs."""
        return next((name for name, item in self.items.items() if item["state"] == RUNS), None)

    def begin(self, item: str) -> None:
        """Notes that `item` runs. A process that is still in it when its time is over ends with a traceback."""
        self._begun = time.monotonic()
        if self.limit:
            faulthandler.dump_traceback_later(self.limit, exit=True)
        self._add({"item": item, "state": RUNS})

    def end(self, item: str, state: str = PASSED, text: str = "", row: Mapping[str, Any] | None = None) -> None:
        """Notes how `item` ended, and its row. While another item runs, that one goes on."""
        seconds = 0.0
        if self.current == item:
            faulthandler.cancel_dump_traceback_later()
            seconds = round(time.monotonic() - self._begun, 2)
        self._add({"item": item, "state": state, "seconds": seconds, "text": text[-TEXT:], "row": row})

    def note(self, **about: Any) -> None:
        """Notes fields of the section as a whole."""
        self._add(about)

    def state(self) -> str:
        """The section in one word: "passed", "failed", "missing", "no time", or "" if it never ran."""
        states = {item["state"] for item in self.items.values()}
        if self.about["missing"]:
            return MISSING
        if self.about["error"] or states & set(BAD):
            return FAILED
        if self.about["ended"]:
            return NO_TIME if NO_TIME in states else PASSED
        return NO_TIME if states else ""

    def counts(self) -> dict[str, int]:
        """The number of items in each state."""
        counts: dict[str, int] = {}
        for item in self.items.values():
            counts[item["state"]] = counts.get(item["state"], 0) + 1
        return counts

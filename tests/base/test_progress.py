"""The line of a long call: on a terminal, with seconds that move, gone at the end; nothing in a log."""

import io
import sys
import time

import pytest

from jaxmp._src.base import progress


class Terminal(io.StringIO):
    def isatty(self):
        return True

    def line(self):
        """What stands on the line after all that was written, as a terminal shows it."""
        shown = ""
        for part in self.getvalue().split("\r"):
            shown = part + shown[len(part) :]
        return shown


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(progress, "_FIRST", 0.0)
    monkeypatch.setattr(progress, "_EVERY", 0.005)


def until(condition):
    for _ in range(2000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("it never came")


def test_a_log_gets_nothing(monkeypatch, quick):
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    with progress.Progress("saving") as line:
        line.say("1 of 2 tensors")
        time.sleep(0.05)
    assert log.getvalue() == ""


def test_a_process_without_stderr_is_no_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    with progress.Progress("saving") as line:
        line.say("1 of 2 tensors")
    assert line._thread is None


def test_a_terminal_shows_what_is_done_and_is_clean_at_the_end(monkeypatch, quick):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress.Progress("saving") as line:
        line.say("a first stage with a long name")
        until(lambda: terminal.line().startswith("saving, 0 s: a first stage with a long name"))
        line.say("the second")
        until(lambda: terminal.line().rstrip() == "saving, 0 s: the second")
    assert terminal.line().strip() == "" and terminal.getvalue().endswith("\r") and "\n" not in terminal.getvalue()


def test_an_error_leaves_no_line(monkeypatch, quick):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with pytest.raises(ValueError, match="no disk"), progress.Progress("saving") as line:
        line.say("1 of 2 tensors")
        until(terminal.getvalue)
        raise ValueError("no disk")
    assert terminal.line().strip() == ""


def test_a_line_fits_the_terminal(monkeypatch, quick):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "40")
    with progress.Progress("saving") as line:
        line.say("x" * 200)
        until(lambda: "x" in terminal.getvalue())
    assert max(map(len, terminal.getvalue().split("\r"))) == 39


def test_a_short_call_shows_nothing(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress.Progress("saving") as line:
        line.say("1 of 2 tensors")
    assert terminal.getvalue() == ""

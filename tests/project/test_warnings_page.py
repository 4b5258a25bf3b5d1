"""docs/warnings.md and the sources have the same entries, and each warning names its own."""

import ast
import re
import warnings

import pytest

import errors
from helpers import ROOT
from jaxmp._src.base.warn import PAGE, warn

SOURCES = [path for folder in ("jaxmp", "pallas_kernels") for path in (ROOT / folder).rglob("*.py")]
TEXT = (ROOT / PAGE).read_text()


def test_every_warning_names_an_entry():
    texts = [path.read_text() for path in SOURCES if path.name != "warn.py"]
    nodes = [node for text in texts if "warn(" in text for node in ast.walk(ast.parse(text))]
    calls = [(ast.unparse(node.func), node) for node in nodes if isinstance(node, ast.Call)]
    assert [ast.unparse(node) for name, node in calls if name == "warnings.warn"] == []
    named = {node.args[0].value for name, node in calls if name == "warn"}
    assert sorted(named) == sorted(re.findall(r"^### (.*)$", TEXT, flags=re.MULTILINE))


def test_a_warning_comes_from_the_line_of_the_caller_and_can_be_silenced_by_its_entry():
    with pytest.warns(UserWarning, match=r"^no\. \[docs/warnings\.md#an-entry\]$") as seen:
        warn("an-entry", "no.")
    assert seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r".*warnings\.md#an-entry")
        warn("an-entry", "no.")


def test_errors_are_read_off_the_sources():
    source = """
WHY = "because"
raise ValueError(f"x must be 1; got {x}: {WHY}." + " Use 1.")
raise TypeError(made_elsewhere())
raise checks.TrainingStuck("it skips")
"""
    assert list(errors.errors_of(source)) == [
        ("ValueError", "x must be 1; got …: because. Use 1."),
        ("TrainingStuck", "it skips"),
    ]
    by_room = errors.errors()
    assert {"step", "fp8", "checkpoint", "pallas_kernels"} < set(by_room)
    assert any("a run must not skip … steps in a row" in message for _, message in by_room["step"])

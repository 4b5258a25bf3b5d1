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


def calls(name):
    """Calls of the function `name`, in all sources but that of `warn` itself."""
    for path in SOURCES:
        if path.name != "warn.py":
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == name:
                    yield path, node


def test_every_warning_names_an_entry():
    assert [str(path) for path, _ in calls("warnings.warn")] == []
    named = {node.args[0].value for _, node in calls("warn")}
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
    found = errors.errors()
    assert {"step", "fp8", "checkpoint", "pallas_kernels"} < set(found)
    assert any("a run must not skip … steps in a row" in message for _, message in found["step"])

"""What a user installs: metadata, what the wheel holds, and extras."""

import ast
import itertools
import re
import tomllib

import pytest

from helpers import ROOT, python_blocks

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
WHEEL = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]


def names_of(requirements):
    return {re.match(r"[\w-]+", requirement)[0] for requirement in requirements}


def test_no_placeholder_is_left():
    assert "[" not in (ROOT / "LICENSE").read_text().partition("Copyright 20")[2]
    assert PROJECT["project"]["authors"] == [{"name": "jaxmp developers"}]


def test_each_python_that_ci_runs_is_a_classifier():
    classifiers = PROJECT["project"]["classifiers"]
    pythons = [c.rpartition(" ")[2] for c in classifiers if re.search(r":: 3\.\d+$", c)]
    assert pythons == ["3.11", "3.12", "3.13"]
    assert PROJECT["project"]["requires-python"] == f">={pythons[0]}"


def test_versions_agree():
    (cited,) = re.findall(r"^version: (.*)$", (ROOT / "CITATION.cff").read_text(), flags=re.MULTILINE)
    assert cited == PROJECT["project"]["version"]


def test_a_wheel_has_no_tests():
    inside = [path.relative_to(ROOT) for folder in WHEEL for path in (ROOT / folder).rglob("*.py")]
    assert len(inside) > 100
    assert [path for path in inside if "test" in path.name or path.name == "conftest.py"] == []


def imports_of(source):
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


def test_the_readme_needs_core_dependencies_only():
    imports = {name for block in python_blocks(ROOT / "README.md") for name in imports_of(block)}
    assert imports <= {"jaxmp"} | names_of(PROJECT["project"]["dependencies"])


# Packages whose import has another name than the distribution, or that come with one of the extra.
DISTRIBUTION = {"orbax": "orbax-checkpoint", "etils": "orbax-checkpoint"}


def test_an_error_names_the_extra_that_installs_the_package():
    named = []
    texts = [path.read_text() for path in (ROOT / "jaxmp").rglob("*.py")]
    for text in (text for text in texts if "optional.load(" in text):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "optional.load":
                package = node.args[0].value.partition(".")[0]
                named.append((DISTRIBUTION.get(package, package), node.keywords[0].value.value))
    assert named
    assert [(package, extra) for package, extra in named if package not in names_of(EXTRAS[extra])] == []


def test_extras_on_the_pages_exist():
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    named = {extra for page in pages for extra in re.findall(r"'(?:\.|jaxmp)\[([\w-]+)\]'", page.read_text())}
    assert named and named <= set(EXTRAS)


def test_the_workflow_runs_all_of_ci_and_the_built_wheel():
    yaml = pytest.importorskip("yaml", reason="comes with mkdocs")
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    runs = {name: [step.get("run", "") for step in job["steps"]] for name, job in jobs.items()}
    assert "bash .ci/run" in runs["test"]
    assert any("pip wheel" in run for run in runs["wheel"]) and any("pip install dist/" in run for run in runs["wheel"])
    for run in itertools.chain.from_iterable(runs.values()):
        for path in re.findall(r"\.ci/[\w./-]+", run):
            assert (ROOT / path).is_file(), path
    for job in jobs.values():
        assert all(("run" in step) != ("uses" in step) for step in job["steps"])


def test_pre_commit_runs_ruff():
    yaml = pytest.importorskip("yaml", reason="comes with mkdocs")
    (repo,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert [hook["id"] for hook in repo["hooks"]] == ["ruff-check", "ruff-format"]
    assert re.fullmatch(r"v\d+\.\d+\.\d+", repo["rev"])

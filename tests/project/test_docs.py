"""The documentation: code runs page by page from top to bottom, links resolve, and nothing public is left out."""

import importlib
import inspect
import itertools
import re

import pytest

import names
from helpers import ROOT, python_blocks

pytestmark = pytest.mark.in_haste

DOCS = sorted((ROOT / "docs").rglob("*.md"))
LINKING = [
    ROOT / "README.md",
    *DOCS,
    *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")),
]
# The two halves of a diff: they show a change and do not stand alone.
FRAGMENTS = ("tx = optax.adamw(1e-3)\nstate", 'tx = jaxmp.mixed_precision(optax.adamw(1e-3), "fp16")\nstate')
# Pages that show no code: what they say is proved by the tests and results that they name.
WITHOUT_CODE = {"comparison.md"}


def name_of(page):
    return str(page.relative_to(ROOT)).removeprefix("docs/")


@pytest.mark.newest
@pytest.mark.parametrize("page", [ROOT / "README.md", *DOCS], ids=name_of)
def test_code_of_page_runs(page):
    blocks = [block for block in python_blocks(page) if not block.lstrip("\n").startswith(FRAGMENTS)]
    assert bool(blocks) == (name_of(page) not in WITHOUT_CODE)
    namespace = {}
    for block in blocks:
        exec(compile(block, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", LINKING, ids=name_of)
def test_links_of_page_resolve(page):
    """Files, and headings where a link names one; `make docs` looks at the built pages."""
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = page.parent / path if path else page
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), flags=re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in slugs, link


PUBLIC = [name for _, found in names.pages().values() for name in found]


def resolved(name):
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(module), attribute)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_has_an_example(name):
    """But for constants, whose docstring would be their type's."""
    if callable(resolved(name)):
        assert ">>>" in (resolved(name).__doc__ or "")


@pytest.mark.parametrize("module", ["jaxmp", *names.namespaces()])
def test_no_public_name_is_missing_in_the_reference(module):
    """The reference reads sources; this asks the imported module for what it holds of its own."""
    found = importlib.import_module(module)
    handed_on = module + "." if hasattr(found, "__path__") else "no module at all"  # a package hands on what it has
    own = {
        f"{module}.{name}"
        for name, value in vars(found).items()
        if not name.startswith("_")
        and (inspect.isfunction(value) or inspect.isclass(value))
        and (value.__module__ == module or value.__module__.startswith(handed_on))
    }
    assert own or module != "jaxmp"
    assert own <= set(PUBLIC)
    assert module == "jaxmp" or any(name.startswith(module + ".") for name in PUBLIC)
    assert len(PUBLIC) == len(set(PUBLIC))


@pytest.mark.parametrize("module", names.namespaces())
def test_namespaces_say_what_they_are(module):
    assert len(importlib.import_module(module).__doc__.splitlines()) > 1


def test_titles_of_the_reference_name_rooms_that_exist():
    """The name of a room that was moved would remain as the title of an empty page."""
    assert set(names.TITLES) <= {path.name for path in (ROOT / "jaxmp" / "_src").iterdir()}
    assert set(names.TITLES) <= set(names.pages())


COMPARISON = (ROOT / "docs" / "comparison.md").read_text()


def rows_and_proofs():
    rows = re.findall(r"^\| (\d+)\. ", COMPARISON, flags=re.MULTILINE)
    proofs = dict(re.findall(r"^(\d+)\. (.*(?:\n +.*)*)", COMPARISON, flags=re.MULTILINE))
    return rows, proofs


def test_each_row_of_the_comparison_names_its_tests():
    rows, proofs = rows_and_proofs()
    assert rows == [str(i + 1) for i in range(len(rows))] == list(proofs)


@pytest.mark.parametrize("row", rows_and_proofs()[1])
def test_tests_that_the_comparison_names_exist(row):
    named = re.findall(r"`(test_\w+)::(test_\w+)`", rows_and_proofs()[1][row])
    assert named
    for file, test in named:
        (found,) = (ROOT / "tests").rglob(f"{file}.py")
        assert f"\ndef {test}(" in found.read_text(), (file, test)


@pytest.mark.parametrize("page", LINKING, ids=name_of)
def test_lists_are_lists_for_the_site_too(page):
    """Python-Markdown wants an empty line before a list, and four spaces before a paragraph that belongs to an item."""
    text = re.sub(r"^```.*?^```$|\A---\n.*?^---$", "\n", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    item = re.compile(r"([-*]|\d+\.) ")
    for before, line in itertools.pairwise(text.splitlines()):
        starts = item.match(line) and before.strip() and not item.match(before) and not before.startswith(" ")
        assert not starts, f"a list without an empty line before it: {line}"
        assert before.strip() or not re.match(r" {1,3}\S", line), f"less than four spaces: {line}"

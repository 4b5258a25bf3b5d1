"""The documentation: links resolve, lists are lists, no code is clipped, and every public name is listed."""

import importlib
import inspect
import itertools
import re

import pytest

import links
import markup
import names
import reference
from helpers import ROOT
from pages import DOCS, name_of

LINKING = [
    ROOT / "README.md",
    *DOCS,
    *(ROOT / name for name in ("CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md")),
]


def test_no_line_of_code_is_clipped():
    """At a width of 1280 pixels a page shows 88 characters."""
    long = [
        f"{name_of(page)}: {line}"
        for page in DOCS
        for block in re.findall(r"^```\w*\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for line in block.splitlines()
        if len(line) > 88
    ]
    assert long == []


def slugs_of(page):
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def resolves(page, link):
    path, _, anchor = link.partition("#")
    target = page.parent / path if path else page
    return "://" in link or (target.exists() and (not anchor or anchor in slugs_of(target)))


def test_links_resolve():
    """Files, and headings if a link names one. `make docs` checks the built pages."""
    links = [(page, link) for page in LINKING for link in re.findall(r"\]\(([^)\s]+)(?: '[^']*')?\)", page.read_text())]
    assert len(links) > 100
    assert [f"{name_of(page)}: {link}" for page, link in links if not resolves(page, link)] == []


PUBLIC = [name for _, found in names.pages().values() for name in found]
MODULES = ["jaxmp", *names.namespaces()]


def has_example(name):
    """True for a constant: its docstring would be that of its type."""
    module, _, attribute = name.rpartition(".")
    value = getattr(importlib.import_module(module), attribute)
    return not callable(value) or ">>>" in (value.__doc__ or "")


def test_every_public_name_has_an_example():
    assert [name for name in PUBLIC if not has_example(name)] == []


def test_the_reference_says_what_each_function_and_class_is():
    silent = {name for name in PUBLIC if not names.first_line(name)}
    assert all(
        not callable(getattr(importlib.import_module(n.rpartition(".")[0]), n.rpartition(".")[2])) for n in silent
    )


def test_the_reference_lists_every_public_name_once():
    """The reference reads sources. This test asks the imported modules."""
    assert len(PUBLIC) == len(set(PUBLIC))
    for module in MODULES:
        found = importlib.import_module(module)
        handed_on = module + "." if hasattr(found, "__path__") else "no module at all"  # a package exports its modules
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


MOST_NAMES = 120  # beside those of pallas_kernels


def test_public_names_are_few_enough_to_read():
    """A new name needs a reason that none of these has; a class that only comes out of a function is none."""
    assert sum(name.startswith("jaxmp.") for name in PUBLIC) <= MOST_NAMES


def test_what_functions_return_is_documented_with_them():
    found = {name: [path.rpartition(".")[2] for path in paths] for name, paths in names.results().items()}
    assert found["jaxmp.monitor.step_stats"] == ["StepStats", "TensorStats", "Fp8Stats"]
    assert found["jaxmp.monitor.Monitor"] == ["Finding"] and found["jaxmp.memory.plan"] == ["Plan"]
    assert not {name.rpartition(".")[2] for name in PUBLIC} & {"StepStats", "Finding", "Plan"}
    page = reference.page_text("monitor", *names.pages()["monitor"])
    assert "::: jaxmp._src.monitor.rules.Finding\n    options: {heading_level: 4, show_root_full_path: false}" in page


def test_long_pages_of_the_reference_are_grouped_by_what_names_are_for():
    for page, (_, found) in names.pages().items():
        grouped = {name for group in names.GROUPS.get(page, {}).values() for name in group}
        assert grouped <= {name.rpartition(".")[2] for name in found}
        titles = [title for title, _ in names.groups_of(page, found)]
        assert len(found) < 10 or (len(titles) > 1 and "Others" not in titles), page


def test_namespaces_say_what_they_are():
    short = [module for module in names.namespaces() if len(importlib.import_module(module).__doc__.splitlines()) < 2]
    assert short == []


def test_titles_of_the_reference_name_rooms_that_exist():
    """A room that was renamed would leave its old title behind."""
    assert set(names.TITLES) <= {path.name for path in (ROOT / "jaxmp" / "_src").iterdir()}
    assert set(names.TITLES) <= set(names.pages())


def rooms_of_the_table():
    text = (ROOT / "docs" / "explanation" / "step.md").read_text()
    table = text.partition("| room |")[2].partition("\n\n")[0]
    return re.findall(r"^\| `(\w+)` \| ", table, flags=re.MULTILINE)


def test_the_table_of_rooms_has_every_room():
    rooms = {path.parent.name for path in (ROOT / "jaxmp" / "_src").glob("*/__init__.py")}
    assert sorted(rooms_of_the_table()) == sorted(rooms)


def missing_tests(text):
    """Tests that a text names and that are not there."""
    files = {path.stem: path.read_text() for path in (ROOT / "tests").rglob("test_*.py")}
    named = re.findall(r"`(test_\w+)::(test_\w+)`", text)
    assert named
    return [(file, test) for file, test in named if f"\ndef {test}(" not in files.get(file, "")]


def test_the_comparison_names_existing_tests_for_each_row():
    text = (ROOT / "docs" / "comparison.md").read_text()
    rows = re.findall(r"^\| (\d+)\. ", text, flags=re.MULTILINE)
    proofs = dict(re.findall(r"^(\d+)\. (.*(?:\n +.*)*)", text, flags=re.MULTILINE))
    assert rows == [str(i + 1) for i in range(len(rows))] == list(proofs)
    assert [(row, missing) for row, proof in proofs.items() if (missing := missing_tests(proof))] == []


def test_each_row_of_the_comparison_has_a_test_of_jaxmp_and_of_what_its_marks_say():
    """`r` needs a test that runs the system (in tests/peers, or `# the peer`); `t` one that reads recorded traces."""
    text = (ROOT / "docs" / "comparison.md").read_text()
    files = {path.stem: path for path in (ROOT / "tests").rglob("test_*.py")}
    sources = {name: path.read_text() for name, path in files.items()}
    rows = dict(re.findall(r"^\| (\d+)\. (.*)$", text, flags=re.MULTILINE))
    for row, proof in re.findall(r"^(\d+)\. (.*(?:\n +.*)*)", text, flags=re.MULTILINE):
        named = re.findall(r"`(test_\w+)::(test_\w+)`", proof)
        bodies = [sources[file].split(f"\ndef {test}(")[1].split("\n\n\n")[0] for file, test in named]
        assert any(
            files[file].parent.name != "peers" or "megatron" in file or re.search(r"\bjaxmp\.|\bours\b", body)
            for (file, _), body in zip(named, bodies, strict=True)
        ), row
        marks = {cell.rpartition(" ")[2] for cell in rows[row].split(" | ")}
        beside = [files[file].parent.name == "peers" or "optax" in test for file, test in named]
        assert "r" not in marks or any(beside) or any("# the peer" in body for body in bodies), row
        assert "t" not in marks or any("oracle" in sources[file] or "traces" in sources[file] for file, _ in named), row


def test_the_guarantees_name_existing_tests():
    assert missing_tests((ROOT / "docs" / "explanation" / "guarantees.md").read_text()) == []


ITEM = re.compile(r"([-*]|\d+\.) ")


def faults_of_lists(page):
    """Python-Markdown needs an empty line before a list, and four spaces before a second paragraph of an item."""
    text = re.sub(r"^```.*?^```$|\A---\n.*?^---$", "\n", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for before, line in itertools.pairwise(text.splitlines()):
        if ITEM.match(line) and before.strip() and not ITEM.match(before) and not before.startswith(" "):
            yield f"{name_of(page)}: a list without an empty line before it: {line}"
        if not before.strip() and re.match(r" {1,3}\S", line):
            yield f"{name_of(page)}: less than four spaces: {line}"


def test_lists_are_lists_for_the_site_too():
    assert [fault for page in LINKING for fault in faults_of_lists(page)] == []


def test_the_checker_of_the_site_finds_what_leads_nowhere(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "a.html").write_text('<h1 id="top"></h1><a href="b/c.html#x"></a><a href="#top"></a><img src="no.png">')
    (tmp_path / "b" / "c.html").write_text('<a href="../a.html#nowhere"></a><a href="https://example.org/x"></a>')
    assert links.faults(tmp_path) == ["a.html: b/c.html#x", "a.html: no.png", "b/c.html: ../a.html#nowhere"]


def test_markdown_that_is_shown_as_text_is_found():
    pytest.importorskip("markdown")
    import markdown

    def left(text):
        return markup.leftovers(markdown.markdown(text, extensions=["sane_lists", "tables"]))

    assert left("* one\n\n    more of it\n* two") == ["* two"]
    assert left("* one\n\n    more of it\n\n* two") == []
    assert left("text\n* one") == ["* one"]
    assert left("text `* x`\n\n    * code\n\n| a | b |\n|---|---|\n| 1 | 2 |") == []
    assert left("text\n| a | b |\n|---|---|") == ["| a | b |"]

"""The code of README.md and docs/ runs, page by page from top to bottom."""

import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKING = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md"]
# The two halves of a diff: they show a change and do not stand alone.
FRAGMENTS = ("tx = optax.adamw(1e-3)\nstate", 'tx = jaxmp.mixed_precision(optax.adamw(1e-3), "fp16")\nstate')


def python_blocks(page):
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.newest
@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_code_of_page_runs(page):
    blocks = [block for block in python_blocks(page) if not block.startswith(FRAGMENTS)]
    assert blocks
    namespace = {}
    for block in blocks:
        exec(compile(block, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", LINKING, ids=lambda p: p.name)
def test_links_of_page_resolve(page):
    links = re.findall(r"\]\(([^)#]+)\)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not missing

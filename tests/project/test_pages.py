"""The code of each page runs from top to bottom."""

import pytest

import pages
from helpers import python_blocks

# Pages without code: the tests and results that they name prove what they say.
WITHOUT_CODE = {"comparison.md"}
OF_EVERY_RUN = ("index.md", "tutorial.md")
PAGES = [
    pytest.param(page, marks=[] if pages.name_of(page) in OF_EVERY_RUN else pytest.mark.thorough(0))
    for page in pages.DOCS
]


@pytest.mark.parametrize("page", PAGES, ids=pages.name_of)
def test_code_of_page_runs(page):
    """Of pages in docs/; test_readme.py runs the README."""
    assert bool(python_blocks(page)) == (pages.name_of(page) not in WITHOUT_CODE)
    pages.run(page)

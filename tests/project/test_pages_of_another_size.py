"""The code of each page that names the sizes of its data runs with three times of them, and its assertions hold."""

import pytest

import pages
from helpers import python_blocks

SIZED = [page for page in pages.DOCS if any(map(pages.SIZE.search, python_blocks(page)))]


@pytest.mark.thorough(0)
@pytest.mark.parametrize("page", SIZED, ids=pages.name_of)
def test_code_of_page_runs_with_data_of_another_size(page):
    pages.run(page, factor=3)


def test_most_pages_name_the_sizes_of_their_data():
    assert len(SIZED) >= 20
    assert pages.with_sizes("rows, features = 32, 8  # any\nx = 4", 3) == "rows, features = 96, 24  # any\nx = 4"

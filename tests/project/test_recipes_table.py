"""benchmarks/recipes.py: the table of the page is that of the stored results, and says what its page says."""

import json

import pytest

from benchmarks import recipes
from benchmarks.lib import tables

STORED = json.loads(recipes.BENCHMARK.results.read_text())


def test_the_page_shows_the_stored_results():
    start, _ = tables.markers("recipes")
    page = recipes.BENCHMARK.page.read_text()
    assert start in page and recipes.render(STORED) in page


def test_every_recipe_is_measured_and_outliers_cost_one_scale_most():
    found = {(row["recipe"], row["data"]): row for row in STORED["rows"]}
    assert set(found) == {(name, data) for name in recipes.RECIPES for data in recipes.DATA}
    one, rows = list(recipes.RECIPES)[:3:2]
    assert found[one, "normal"]["y"] > 28 and found[one, "outliers"]["y"] < 10 < 28 < found[rows, "outliers"]["y"]


def test_a_row_is_measured_as_stored():
    x, w, g = recipes.tensors("normal", 512, 512)
    y, *_ = recipes.products(recipes.RECIPES["`RowwiseScaling`"], x, w, g)
    found = recipes.sqnr_of_rows(y, x.astype("f8") @ w.astype("f8"))
    assert found == pytest.approx(next(r for r in STORED["rows"] if r["recipe"] == "`RowwiseScaling`")["y"], abs=0.1)

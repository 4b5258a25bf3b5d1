"""Which recipe to use when, with the measurements of each: the second table of `python -m jaxmp formats`.

The decibels are the SQNR of a product y on normal data and on data in which one element in 2000 is 10^5 times as large
(`python -m benchmarks recipes`). The losses are held-out losses of a small transformer in percent of bfloat16's
(`make parity`). A test compares the numbers with the stored results.
"""

from typing import Any

from jaxmp._src.fp8.scheme import Guide, Recipe


def guides(face: Any) -> list[Guide]:
    """Those of the recipes that a module hands on, as `jaxmp.fp8` does: the simplest first."""
    recipes = [x for x in vars(face).values() if isinstance(x, type) and issubclass(x, Recipe)]
    return sorted((recipe.guide for recipe in recipes), key=lambda guide: guide.place)


def rows(face: Any) -> list[tuple[str, ...]]:
    """The rows of a table of the recipes of a module, with the head first."""
    head = ("recipe", "a scale for each", "SQNR [dB]", "with outliers", "loss gap [%]", "take it for")
    return [head, *(_shown(guide) for guide in guides(face))]


NOTES = (
    "SQNR: of a product, on normal data and where one element in 2000 is 10^5 times as large; 6 dB are one bit.",
    "loss gap: held-out loss of a small transformer against bfloat16's, ± its standard error; empty: too few runs.",
)


def _shown(guide: Guide) -> tuple[str, ...]:
    loss = "" if guide.loss is None else f"{guide.loss:+.2f} ± {guide.error:.2f}"
    return (guide.recipe, guide.scale, str(guide.decibels), str(guide.with_outliers), loss, guide.take)

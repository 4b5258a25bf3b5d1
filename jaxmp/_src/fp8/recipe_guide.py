"""Which recipe to use when, with the measurements of each: the second table of `python -m jaxmp formats`.

The decibels are the SQNR of a product y on normal data and on data in which one element in 2000 is 10^5 times as large
(`python -m benchmarks recipes`). The losses are held-out losses of a small transformer in percent of bfloat16's
(`make parity`). A test compares the numbers with the stored results.
"""

from typing import NamedTuple


class Guide(NamedTuple):
    """One recipe.

    Attributes:
      recipe: its name in `jaxmp.fp8`.
      scale: what one scale is for.
      decibels, with_outliers: SQNR of a product, on normal data and on data with outliers.
      loss, error: the mean gap of its held-out loss to bfloat16's, and the standard error, in percent; None where
        fewer seeds were trained than they need.
      take: when.
    """

    recipe: str
    scale: str
    decibels: int
    with_outliers: int
    loss: float | None
    error: float | None
    take: str


GUIDES = (
    Guide("DelayedScaling", "tensor, from earlier steps", 28, 5, 0.14, 0.06, "first: it moves the fewest bytes"),
    Guide("CurrentScaling", "tensor", 28, 5, 0.41, 0.28, "data that jumps; functions without state"),
    Guide("RowwiseScaling", "token, output channel", 28, 28, 0.29, 0.17, "outliers, on any GPU with fp8"),
    Guide("BlockScaling", "128, 128x128 of weights", 28, 28, 0.31, 0.14, "outliers, at the speed of bfloat16"),
    Guide("MXFP8", "32 elements", 28, 28, 0.43, 0.22, "outliers, on Blackwell"),
    Guide("NVFP4", "16 elements, and tensor", 17, 16, None, None, "Blackwell, if four bits suffice"),
)


def rows() -> list[tuple[str, ...]]:
    """The rows of a table of the recipes, with the head first."""
    head = ("recipe", "a scale for each", "SQNR [dB]", "with outliers", "loss gap [%]", "take it for")
    return [head, *(_shown(guide) for guide in GUIDES)]


NOTES = (
    "SQNR: of a product, on normal data and where one element in 2000 is 10^5 times as large; 6 dB are one bit.",
    "loss gap: held-out loss of a small transformer against bfloat16's, ± its standard error; empty: too few runs.",
)


def _shown(guide: Guide) -> tuple[str, ...]:
    loss = "" if guide.loss is None else f"{guide.loss:+.2f} ± {guide.error:.2f}"
    return (guide.recipe, guide.scale, str(guide.decibels), str(guide.with_outliers), loss, guide.take)

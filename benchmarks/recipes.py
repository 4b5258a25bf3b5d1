"""Measures how precise the products of a layer are in each fp8 and fp4 recipe, and shows what these cost in loss."""

import functools
import json
from typing import Any

import jax
import numpy as np

from benchmarks.lib.benchmark import Benchmark
from benchmarks.lib.tables import RESULTS, ROOT, markdown
from benchmarks.lib.versions import versions
from jaxmp import fp8

FACTOR = 1e5
MATMUL = (((1,), (0,)), ((), ()))
RECIPES = {
    "`DelayedScaling`, `CurrentScaling`": fp8.CurrentScaling(),
    '`CurrentScaling(fp8_format="E4M3")`': fp8.CurrentScaling(fp8_format="E4M3"),
    "`RowwiseScaling`": fp8.RowwiseScaling(),
    "`BlockScaling`": fp8.BlockScaling(),
    "`MXFP8`": fp8.MXFP8(),
    "`NVFP4`": fp8.NVFP4(),
    "`NVFP4`, to nearest": fp8.NVFP4(stochastic_rounding=False),
    "`NVFP4`, to nearest, without Hadamard": fp8.NVFP4(stochastic_rounding=False, hadamard=False),
    "`Int8`": fp8.Int8(),
}
LOSSES = {  # the policies of parity.json that train in a recipe of RECIPES
    "`DelayedScaling`, `CurrentScaling`": ("fp8",),
    "`RowwiseScaling`": ("RowwiseScaling",),
    "`BlockScaling`": ("BlockScaling",),
    "`MXFP8`": ("MXFP8",),
    "`NVFP4`": ("NVFP4",),
}
TEXTS = ("parity_fp8.json", "parity_fp8_another_text.json")  # what the default costs, and without a part of it
SEEDS = 4  # the mean of fewer says nothing: the gaps of single pairs of seeds deviate by 0.3 %
DATA = ("normal", "outliers", "large rows")
PRODUCTS = ("y", "dx", "dw")


def tensors(data: str, rows: int, width: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x [rows, 2 width], w and g in float32; outliers, or large rows (tokens), of x and g are 10^5 times as large."""
    rng = np.random.default_rng(seed)
    x, w, g = (rng.normal(size=s) for s in ((rows, 2 * width), (2 * width, width), (rows, width)))
    for t in (x, g):
        if data == "outliers":
            t[rng.random(t.shape) < 1 / 2000] *= FACTOR
        if data == "large rows":
            t[:: max(1, rows // 8)] *= FACTOR
    return x.astype(np.float32), w.astype(np.float32), g.astype(np.float32)


@functools.partial(jax.jit, static_argnums=0)
def products(recipe: Any, x: Any, w: Any, g: Any) -> Any:
    """y = x w, dx = g w^T and dw = x^T g, float32; NVFP4's gradients are rounded at random, with one key."""
    key = jax.random.key(0)
    y, back = jax.vjp(lambda x, w: fp8.dot_general(x, w, MATMUL, recipe=recipe, key=key), x, w)
    return y, *back(g)


def sqnr_of_rows(product: Any, exact: np.ndarray) -> float:
    """10 log10(sum x^2 / sum (x - cast(x))^2), in dB: the median over the rows, as the largest rows are precise."""
    noise = np.asarray(product, np.float64) - exact
    return float(np.median(10 * np.log10((exact**2).sum(1) / (noise**2).sum(1))))


def measure(rows: int = 512, width: int = 512) -> dict[str, Any]:
    """A row for each recipe and kind of data, by the emulation on CPUs.

    Delayed scaling has seen the same tensors in the step before, so its scales are those of current scaling.
    """
    results = []
    for data in DATA:
        x, w, g = tensors(data, rows, width)
        wide = [t.astype(np.float64) for t in (x, w, g)]
        exact = (wide[0] @ wide[1], wide[2] @ wide[1].T, wide[0].T @ wide[2])
        for name, recipe in RECIPES.items():
            pairs = zip(PRODUCTS, products(recipe, x, w, g), exact, strict=True)
            row = {product: round(sqnr_of_rows(y, true), 1) for product, y, true in pairs}
            results.append({"recipe": name, "data": data, **row})
    return {"device": "CPU", "versions": versions(("jax", "jaxlib", "jaxmp")), "rows": results}


def losses() -> dict[str, dict[str, Any]]:
    """The policies of the stored run of `make parity`, with their gaps; those of the default from its own runs."""
    parity = json.loads((RESULTS / "parity.json").read_text())["summary"]
    again = json.loads((RESULTS / TEXTS[0]).read_text())["summary"]
    return {name: row for name, row in parity.items() if name not in again} | {"fp8": again["fp8"]}


def left_out() -> str:
    """What the default costs on two texts; and with something left out, also beside the default on the same seeds."""
    texts = [json.loads((RESULTS / name).read_text()) for name in TEXTS]
    pythons = [f"loss [%], text of Python {text['versions']['python']}" for text in texts]
    cells = [["trained in", "seeds", *pythons, "loss - that of fp8 [%]", "evaluated in fp8 [%]"]]
    for name, row in texts[0]["summary"].items():
        if not row["fp8_flops_percent"]:
            continue
        differences = []
        for text in texts:
            loss_of = {(run["policy"], run["seed"]): run["held_out"] for run in text["runs"]}
            pairs = [(loss, loss_of["fp8", seed]) for (policy, seed), loss in loss_of.items() if policy == name]
            differences += [100 * (loss - base) / base for loss, base in pairs]
        mean, error = np.mean(differences), np.std(differences, ddof=1) / len(differences) ** 0.5
        beside = "" if name == "fp8" else f"{mean:+.2f} ± {error:.2f}"
        seeds = ", ".join(str(text["summary"][name]["gaps"]) for text in texts)
        evaluated = f"{row['in_fp8_mean_gap_percent']:+.2f}"
        cells.append([name, seeds, *[gap(text["summary"][name]) for text in texts], beside, evaluated])
    return markdown(cells)


def gap(row: dict[str, Any]) -> str:
    """The mean gap of a policy to its baseline ± its standard error, in percent of the loss; "" of too few seeds."""
    if row.get("gaps", 0) < SEEDS:
        return ""
    return f"{row['mean_gap_percent']:+.2f} ± {row['standard_error_percent']:.2f}"


def render(results: dict[str, Any]) -> str:
    """Three tables: decibels and loss of each recipe; what the default costs; choices of layers."""
    parity = losses()
    cells = [["dB of y, dx, dw", *DATA, "loss [%]"]]
    for name in RECIPES:
        rows = {row["data"]: row for row in results["rows"] if row["recipe"] == name}
        decibels = (", ".join(f"{rows[data][product]:.0f}" for product in PRODUCTS) for data in DATA)
        cells.append([name, *decibels, ", ".join(filter(None, (gap(parity.get(p, {})) for p in LOSSES.get(name, ()))))])
    return "\n\n".join([markdown(cells), left_out(), choices({k: v for k, v in parity.items() if k != "fp8"})])


def choices(parity: dict[str, dict[str, Any]]) -> str:
    """What each policy with fp8 costs in loss, and how many FLOPs run in it."""
    cells = [["trained in", "fp8 FLOPs [%]", "seeds", "loss [%]", "evaluated in fp8 [%]"]]
    for name, row in parity.items():
        if row["fp8_flops_percent"]:
            share, evaluated = f"{row['fp8_flops_percent']:.0f}", f"{row['in_fp8_mean_gap_percent']:+.2f}"
            cells.append([name, share, str(row["gaps"]), gap(row), evaluated])
    return markdown(cells)


BENCHMARK = Benchmark(
    "recipes",
    "recipes.json",
    measure,
    render,
    functools.partial(measure, rows=16, width=16),
    page=ROOT / "docs" / "how-to" / "precision" / "recipes.md",
)

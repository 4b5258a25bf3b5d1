"""The README: its size, its code, what the code prints, and the numbers of its table."""

import contextlib
import io
import json
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from helpers import ROOT, python_blocks
from matmul_dtypes import matmuls_in

README = ROOT / "README.md"
NUMBER = r"\d+\.\d+"


def blocks_of(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text(), flags=re.DOTALL | re.MULTILINE)


def ported(source):
    """`source` with the lines of the README's diff changed."""
    (diff,) = blocks_of("diff")
    changes = re.findall(r"((?:^-.*\n)+)((?:^\+.*\n)+)", diff, flags=re.MULTILINE)
    assert "".join(old + new for old, new in changes) == diff
    for old, new in changes:
        old, new = (re.sub(r"^[-+]", "", text, flags=re.MULTILINE) for text in (old, new))
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


def run(source, namespace):
    """What the source prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, str(README), "exec"), namespace)
    return printed.getvalue()


def assert_printed(printed, text):
    """The same words; numbers with a point within what compilers change."""
    assert re.sub(NUMBER, "#", printed) == re.sub(NUMBER, "#", text)
    found, expected = (np.array(re.findall(NUMBER, t), float) for t in (printed, text))
    assert len(expected) > 0
    np.testing.assert_allclose(found, expected, atol=0.015)


@pytest.fixture(scope="module")
def namespaces():
    """What float32, bfloat16 and fp8 print, and the names that they leave."""
    before, fp8 = python_blocks(README)
    found = {"fp32": {}, "bf16": {}}
    sources = {"fp32": before, "bf16": ported(before)}
    printed = {name: run(source, found[name]) for name, source in sources.items()}
    found["fp8"] = dict(found["bf16"])
    printed["fp8"] = run(fp8, found["fp8"])
    return printed, found


def test_it_has_at_most_seven_kilobytes():
    assert len(README.read_bytes()) <= 7000


def test_the_diff_changes_three_lines_and_the_home_page_has_it_too():
    (diff,) = blocks_of("diff")
    assert sum(line.startswith("-") for line in diff.splitlines()) == 3
    assert diff in (ROOT / "docs" / "index.md").read_text()


def test_every_loop_prints_what_the_readme_says(namespaces):
    printed, _ = namespaces
    in_float32, in_fp8 = blocks_of("text")
    for policy in ("fp32", "bf16"):
        assert_printed(printed[policy], in_float32)
    assert_printed(printed["fp8"], in_fp8)


def matmuls_of(names):
    step = jax.make_jaxpr(names["train_step"])(names["state"], names["x"], names["y"])
    return matmuls_in(step)


def test_each_policy_runs_in_what_it_says(namespaces):
    _, names = namespaces
    assert list(matmuls_of(names["fp32"])) == ["float32"]
    assert list(matmuls_of(names["bf16"])) == ["bfloat16"]
    found = matmuls_of(names["fp8"])
    layers = 3
    assert found["float8_e4m3fn"] == layers and found["float8_e4m3fnxfloat8_e5m2"] == 2 * layers
    assert found["bfloat16"] == 5  # the first layer has no gradient of its input
    assert set(found) == {"float8_e4m3fn", "float8_e4m3fnxfloat8_e5m2", "bfloat16"}
    assert names["fp8"]["state"].metrics["fp8/unused"] == 0


def rows():
    """Cells of the table of policies."""
    table = README.read_text().partition("| policy |")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


OPTIMIZERS = {
    '"fp32"': ("fp32", {}),
    '"bf16"': ("bf16", {}),
    '"bf16-mixed"': ("bf16-mixed", {}),
    '"fp16"': ("fp16", {}),
    '"fp8"': ("fp8", {}),
    '"bf16"`, `remainder_bits=8`, 8-bit moments': ("bf16", {"remainder_bits": 8}),
}


def test_the_table_has_a_row_for_each_recipe():
    assert {row[0].strip("`") for row in rows()} == set(OPTIMIZERS)
    assert all(cell for row in rows() for cell in row)


@pytest.mark.thorough(2)
@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0].strip("`"))
def test_bytes_of_a_param(row):
    policy, options = OPTIMIZERS[row[0].strip("`")]
    inner = jaxmp.fused_adamw(1e-3, state_dtype=jnp.int8) if options else optax.adamw(1e-3)
    model, x = nn.Sequential([nn.Dense(1024) for _ in range(4)]), jnp.ones((1, 1024))
    params = jax.eval_shape(jaxmp.autocast(model.init, policy), jax.random.key(0), x)["params"]
    tx = jaxmp.mixed_precision(inner, policy, **options)
    stored = jax.eval_shape(lambda p: (jaxmp.get_policy(policy).cast_to_param(p), tx.init(p)), params)
    total = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(stored))
    assert round(total / (4 * 1024 * 1025)) == int(row[2])


def gap(file, name, digits="+.2f"):
    found = json.loads((ROOT / "benchmarks" / "results" / f"{file}.json").read_text())["summary"][name]
    if "standard_error_percent" in found:
        return f"{found['mean_gap_percent']:{digits}} ± {found['standard_error_percent']:.2f} %"
    error = 100 * found["std_of_gaps"] / found["mean"] / len(found["held_out_losses"]) ** 0.5
    return f"{found['mean_gap_percent']:{digits}} ± {error:.2f} %"


LOSSES = {
    '"bf16"': [gap("parity_16bit", "bf16")],
    '"bf16-mixed"': [gap("parity", "bf16-mixed")],
    '"fp16"': [gap("parity_16bit", "fp16")],
    '"bf16"`, `remainder_bits=8`, 8-bit moments': [gap("parity_8bit", "bf16+8bit"), gap("parity", "bf16+8bit")],
    '"fp8"': [gap("parity_fp8", "fp8"), gap("parity_fp8_another_text", "fp8")],
}


def test_losses_are_the_stored_ones():
    """Also on the page that says where they come from, with every run by itself."""
    page = (ROOT / "docs" / "how-to" / "precision" / "policies.md").read_text()
    for name, gaps in LOSSES.items():
        (cell,) = [row[3] for row in rows() if row[0].strip("`") == name]
        assert cell.startswith(", ".join(gaps)), name
        assert all(f"| {g} |" in page for g in gaps), name


def test_the_comparison_has_as_many_rows_as_the_readme_says():
    (said,) = re.findall(r"(\d+) rows", README.read_text())
    found = re.findall(r"^\| (\d+)\. ", (ROOT / "docs" / "comparison.md").read_text(), flags=re.MULTILINE)
    assert len(found) == int(said)

"""`python -m benchmarks gpu` without a GPU: it runs at tiny sizes, records what fails, judges results by targets."""

import json
import os
import subprocess
import sys
import time

import pytest

import pallas_kernels
from helpers import ROOT, compiled_quickly

pytestmark = [pytest.mark.xdist_group("benchmarks_gpu"), pytest.mark.newest]
BENCHMARKS = ROOT / "benchmarks"
SECTIONS = ("copy", "tests", "casts", "tree", "dense", "crossover")
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_NUMPY_RANK_PROMOTION")}
ENVIRONMENT = compiled_quickly(ENVIRONMENT)


def run(*arguments):
    command = [sys.executable, "-m", "benchmarks.gpu.run", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    out = tmp_path_factory.mktemp("results")
    done = run("--tiny", "--out", out, "--sections", ",".join(SECTIONS))
    assert done.returncode == 0, done.stderr
    (path,) = out.iterdir()
    assert path.name == "gpu_cpu.json"
    return json.loads(path.read_text())


@pytest.fixture
def gpu(monkeypatch):
    from benchmarks.gpu import run as gpu

    return gpu


@pytest.fixture
def bench(gpu):
    from benchmarks.lib.timing import Bench

    return Bench(tiny=True, kernels="interpret", limit=100.0)


def test_results_say_what_was_run_on_what(results):
    assert results["device"] == "cpu"
    assert {"python", "jax", "flax", "optax"} <= results["versions"].keys()
    assert results["seconds"].keys() == {"all", *SECTIONS}
    assert results["targets"] == []


def test_every_row_has_times_and_rates(results):
    sections = {row["section"] for row in results["rows"]}
    assert {"copy", "tree", "dense", "crossover"} <= sections
    for row in results["rows"]:
        assert 0 < row["low_us"] <= row["us"] <= row["high_us"]
        assert 0 < row["host_us"]
        rate = {"copy": "bytes", "casts": "bytes", "tree": "bytes", "dense": "flops"}.get(row["section"], "tokens")
        assert row[f"{rate}_per_s"] > 0
        assert ("of_copy" in row) == (rate == "bytes")
        if rate == "tokens":
            assert row["peak_mib"] > 0 and row["params"] > 0 and row["skipped_steps"] == 0


def test_each_kernel_stands_beside_xla(results):
    by_what = {}
    for row in results["rows"]:
        by_what.setdefault(row["what"], set()).add(row["variant"])
    trees = {what: variants for what, variants in by_what.items() if what.startswith(("unscale", "gradient", "multi"))}
    assert len(trees) == 7
    expected = {"xla"} if pallas_kernels.why_no_kernels() else {"xla", "interpret"}
    assert all(variants == expected for variants in trees.values())


def test_nothing_fails_and_what_is_left_out_has_its_reason(results):
    assert [x for x in results["left_out"] if "traceback" in x] == []
    reasons = {(x["section"], x["what"]): x["reason"] for x in results["left_out"]}
    assert reasons["tests", "tests"] == "kernels run on a GPU only"
    assert "torch" in reasons["tree", "gradient_norm, float16, torch"]


def test_offload_runs_and_counts_what_crosses_the_bus(gpu, bench):
    del gpu
    from benchmarks.gpu import offload as gpu_offload

    bench.start("offload", 100.0)
    gpu_offload.offload(bench)
    assert bench.left_out == []
    rows = {(row["what"], row["variant"]): row for row in bench.rows}
    assert len(rows) == 7
    update, skipped, device = (rows[gpu_offload.UPDATE, name] for name in ("host", "host, skipped", "device"))
    assert update["bus_bytes"] == 24 * update["params"] > 0
    assert skipped["bus_bytes"] == device["bus_bytes"] == 0
    assert update["kinds"] == ["device", "pinned_host"] and device["kinds"] == ["device"]
    step = rows[gpu_offload.STEP, "host"]
    assert step["kinds"] == ["pinned_host"] and step["tokens_per_s"] > 0 and step["bus_bytes"] == 38 * step["params"]
    assert rows[gpu_offload.BUS, "in"]["bus_bytes_per_s"] > 0


def test_a_variant_that_fails_leaves_the_others(bench):
    from benchmarks.lib.timing import Variant

    def broken():
        raise RuntimeError("no such kernel\nand more")

    bench.start("here", 100.0)
    bench.compare("it", {"broken": broken, "sound": lambda: Variant(lambda: 1.0)})
    assert [row["variant"] for row in bench.rows] == ["sound"]
    (left_out,) = bench.left_out
    assert left_out["reason"] == "RuntimeError: no such kernel"
    assert "in broken" in left_out["traceback"]


def test_a_section_that_fails_leaves_the_others(gpu, bench, monkeypatch):
    from benchmarks.gpu import kernels as gpu_kernels

    monkeypatch.setattr(gpu_kernels, "copy", lambda bench: 1 / 0)
    gpu.run_section(bench, "copy")
    assert bench.left_out[0]["reason"] == "ZeroDivisionError: division by zero"


def test_what_there_is_no_time_for_is_left_out(gpu, bench):
    bench.ends = time.monotonic() - 1
    gpu.run_section(bench, "copy")
    assert bench.left_out[0]["reason"] == "the time for the whole run was over"
    bench.section_ends = bench.ends
    bench.compare("it", {"late": lambda: 1 / 0})
    assert bench.left_out[1]["reason"] == "the section's time was over"


def row(what, variant, **fields):
    return {"section": "", "what": what, "variant": variant, **fields}


def test_targets_are_held_missed_or_not_measured(gpu, bench, monkeypatch):
    dense = "Dense 8192x4096x4096, forward and backward"
    bench.rows += [row(dense, "bf16", us=160.0), row(dense, "fp8", us=100.0)]
    layer = "training step of a Llama layer, width 4096"
    bench.rows += [row(layer, "bf16", us=110.0, peak_mib=10.0), row(layer, "fp8", us=100.0, peak_mib=10.0)]
    bench.rows += [row("tests", "mosaic", passed=False)]
    found = {(t["what"], t["wanted"]): t for t in gpu.check(bench, ["tests", "dense", "llama"])}
    assert [t["holds"] for t in found.values()] == [False, True, False, True]
    assert found[dense, "1.5 times as fast as bf16"]["got"] == pytest.approx(1.6)
    # A kernel that gave no time is a miss; torch that is not there is none.
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None)
    holds = [(t["wanted"], t["holds"]) for t in gpu.check(bench, ["tree"])]
    assert set(holds) == {("0.85 of the copy bandwidth", False), ("1.0 times as fast as torch", None)}
    assert "not measured" in gpu.tables_of(
        {"rows": bench.rows[:2], "targets": gpu.check(bench, ["tree"]), "left_out": []}
        | {"rows": [r | {"host_us": 1.0} for r in bench.rows[:2]]}
    )


@pytest.mark.parametrize(
    ("fp8_us", "width"), [((9, 9, 9), 512), ((11, 9, 9), 1024), ((9, 11, 9), 2048), ((9, 9, 11), None)]
)
def test_fp8_pays_from_the_width_behind_which_it_always_does(gpu, fp8_us, width):
    rows = []
    for w, us in zip((512, 1024, 2048), fp8_us, strict=True):
        what = f"training step of a Llama layer, width {w}"
        rows += [row(what, "bf16", us=10), row(what, "fp8", us=us, params=w * w)]
    found = gpu.pays_from(rows)
    assert found["width"] == width
    if width:
        assert (found["layers"], found["params"]) == (width // 128, width // 128 * width**2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tiny"], "--tiny writes no results of a GPU: name a folder with --out"),
        (["--sections", "copies"], "sections are copy, tests, casts"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    done = run(*arguments)
    assert done.returncode == 2
    assert message in done.stderr

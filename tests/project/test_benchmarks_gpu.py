"""`python -m benchmarks gpu` without a GPU: it runs in tiny sizes, records failures, and checks targets.

The sections that take longest to compile run in the campaign only.
"""

import json
import os
import time

import pytest

import pallas_kernels
from benchmarks.gpu import kernels as gpu_kernels, offload as gpu_offload, run as gpu
from benchmarks.lib.timing import Bench, Variant

pytestmark = [pytest.mark.xdist_group("benchmarks_gpu"), pytest.mark.newest]
SECTIONS = ("copy", "tests", "dense")


@pytest.fixture
def bench():
    return Bench(tiny=True, kernels="interpret", limit=1000.0)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """The run sets variables for itself and its processes; they are reset after each test."""
    for name in ("JAX_PLATFORMS", "XLA_PYTHON_CLIENT_PREALLOCATE", "PYTHONPATH"):
        monkeypatch.setenv(name, os.environ.get(name, ""))


def test_a_tiny_run_stores_what_it_measured_and_what_it_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "SECTIONS", {name: (module, 500) for name, (module, _) in gpu.SECTIONS.items()})
    arguments = ["--tiny", "--limit", "1000", "--out", str(tmp_path), "--sections", ",".join(SECTIONS)]
    assert gpu.main(arguments) == 0
    results = json.loads((tmp_path / "gpu_cpu.json").read_text())
    assert results["device"] == "cpu" and results["command"] == "python -m benchmarks gpu"
    assert {"python", "jax", "flax", "optax"} <= results["versions"].keys()
    assert results["seconds"].keys() == {"all", *SECTIONS}
    assert results["targets"] == []
    assert {row["section"] for row in results["rows"]} == {"copy", "dense"}
    check_rows(results["rows"])
    assert [x for x in results["left_out"] if "traceback" in x] == []
    reasons = {(x["section"], x["what"]): x["reason"] for x in results["left_out"]}
    assert reasons["tests", "tests"] == "kernels run on a GPU only"
    assert all(row["variant"] in gpu.tables_of(results) for row in results["rows"])


def check_rows(rows):
    """Every row has times, and the rate of its section."""
    for row in rows:
        assert 0 < row["low_us"] <= row["us"] <= row["high_us"]
        assert 0 < row["host_us"]
        rate = {"copy": "bytes", "casts": "bytes", "tree": "bytes", "dense": "flops"}.get(row["section"], "tokens")
        assert row[f"{rate}_per_s"] > 0
        if rate == "tokens":
            assert row["peak_mib"] > 0 and row["params"] > 0 and row["skipped_steps"] == 0


@pytest.mark.costly
def test_every_kernel_is_timed_beside_torch(bench, monkeypatch):
    """With XLA's versions of the kernels, and one kind of weights: other tests compare the kernels with XLA."""
    bench.kernels = "xla"
    bench.start("casts", 1000.0)
    gpu_kernels.casts(bench)
    assert [row["what"] for row in bench.rows] == [f"cast_transpose_amax, 128x128 {t}" for t in ("float32", "bfloat16")]
    (*_, kind), *_ = [list(gpu_kernels.KINDS)]
    monkeypatch.setattr(gpu_kernels, "KINDS", {kind: gpu_kernels.KINDS[kind]})
    bench.start("tree", 1000.0)
    gpu_kernels.tree(bench)
    expected = ["unscale_and_check, float16", "unscale_and_check, float32", "gradient_norm, float16"]
    assert [row["what"] for row in bench.rows[2:]] == [*expected, f"multi_tensor_update AdamW, {kind}"]
    check_rows(bench.rows)
    assert {x["what"]: "torch" in x["reason"] for x in bench.left_out} == {
        "unscale_and_check, float32, torch": True,
        "gradient_norm, float16, torch": True,
    }


@pytest.mark.campaign
@pytest.mark.parametrize("section", ["casts", "tree", "block", "llama", "crossover", "example"])
def test_every_section_runs(bench, section, monkeypatch):
    monkeypatch.setitem(gpu.SECTIONS, section, (gpu.SECTIONS[section][0], 500))
    gpu.run_section(bench, section)
    assert bench.rows and [x for x in bench.left_out if "traceback" in x] == []
    variants = {row["variant"] for row in bench.rows}
    if section in ("casts", "tree"):
        assert variants == ({"xla"} if pallas_kernels.why_no_kernels() else {"xla", "interpret"})
    if section != "block":  # trains nothing
        check_rows(bench.rows)


@pytest.mark.campaign
def test_offload_runs_and_counts_what_crosses_the_bus(bench):
    bench.start("offload", 500.0)
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
    def broken():
        raise RuntimeError("no such kernel\nand more")

    bench.start("here", 100.0)
    bench.compare("it", {"broken": broken, "sound": lambda: Variant(lambda: 1.0)})
    assert [row["variant"] for row in bench.rows] == ["sound"]
    (left_out,) = bench.left_out
    assert left_out["reason"] == "RuntimeError: no such kernel"
    assert "in broken" in left_out["traceback"]


def test_a_section_that_fails_leaves_the_others(bench, monkeypatch):
    monkeypatch.setattr(gpu_kernels, "copy", lambda bench: 1 / 0)
    gpu.run_section(bench, "copy")
    assert bench.left_out[0]["reason"] == "ZeroDivisionError: division by zero"


def test_what_there_is_no_time_for_is_left_out(bench):
    bench.ends = time.monotonic() - 1
    gpu.run_section(bench, "copy")
    assert bench.left_out[0]["reason"] == "the time for the whole run was over"
    bench.section_ends = bench.ends
    bench.compare("it", {"late": lambda: 1 / 0})
    assert bench.left_out[1]["reason"] == "the section's time was over"


def row(what, variant, **fields):
    return {"section": "", "what": what, "variant": variant, **fields}


def test_targets_are_held_missed_or_not_measured(bench, monkeypatch):
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
def test_fp8_pays_from_the_width_behind_which_it_always_does(fp8_us, width):
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
        (["--tiny"], "--tiny does not measure a GPU: set another folder for its results with --out"),
        (["--sections", "copies"], "sections are copy, tests, casts"),
    ],
)
def test_wrong_arguments_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        gpu.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err

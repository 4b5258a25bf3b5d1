"""The runner of benchmarks, and its programs in tiny sizes, without looking at times."""

import functools
import json
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp
from benchmarks import __main__ as runner, recipes
from benchmarks.cpu import autocast as cpu_autocast, monitor as cpu_monitor, step as cpu
from benchmarks.h100 import fsdp as h100_fsdp
from benchmarks.lib import tables
from benchmarks.lib.benchmark import Benchmark, Rows, run as run_benchmark
from benchmarks.programs import autocast as autocast_programs
from helpers import assert_close, assert_exact, assert_moved
from jaxmp import fp8

F32 = np.float32
ENTRIES = [name for name in runner.entries() if name != runner.GPU]


# --- the runner -------------------------------------------------------------------------------------------------------


@pytest.fixture
def benchmark(tmp_path, monkeypatch):
    """An entry that misses no target, with its results and its page in a folder of its own."""
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    page = tmp_path / "page.md"
    begin, end = tables.markers("cpu some")
    page.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    results = {"device": "CPU", "versions": {"jax": "1"}, "rows": [{"n": 3, "missed": []}]}
    return Benchmark("cpu some", "some.json", lambda: results, lambda r: f"{r['rows'][0]['n']} rows", page=page)


def test_an_entry_stores_results_and_writes_its_tables(benchmark, capsys):
    begin, end = tables.markers("cpu some")
    assert run_benchmark(benchmark) == 0
    assert json.loads(benchmark.results.read_text())["command"] == "python -m benchmarks cpu some"
    assert benchmark.page.read_text() == f"before\n{begin}\n3 rows\n\nCPU; jax 1.\n{end}\nafter\n"
    assert capsys.readouterr().out == "3 rows\n"
    benchmark.results.write_text(benchmark.results.read_text().replace('"n": 3', '"n": 4'))
    assert run_benchmark(benchmark, table=True) == 0
    assert "\n4 rows\n" in benchmark.page.read_text()


@pytest.mark.parametrize("missed", [{"missed": ["too slow"]}, {"rows": [{"n": 3, "missed": ["too slow"]}]}])
def test_a_missed_target_is_the_exit_status(benchmark, missed):
    results = benchmark.measure() | missed
    assert run_benchmark(benchmark._replace(measure=lambda: results)) == 1


def test_tiny_sizes_write_nothing(benchmark, capsys):
    before = benchmark.page.read_text()
    with pytest.raises(SystemExit, match="cpu some has no tiny sizes"):
        run_benchmark(benchmark, tiny=True)
    assert run_benchmark(benchmark._replace(measure_tiny=lambda: {"rows": [{"n": 1}]}), tiny=True) == 0
    assert capsys.readouterr().out == "1 rows\n"
    assert benchmark.page.read_text() == before and not benchmark.results.exists()


@pytest.fixture
def by_row(benchmark, monkeypatch):
    """The same entry, measured row by row: what was measured so far, and the code that measures."""
    measured, code = [], {"checksum": "first", "stops_at": None}

    def job(name):
        if name == code["stops_at"]:
            raise KeyboardInterrupt
        measured.append(name)
        return {"n": len(measured), "missed": []}

    rows = Rows(
        lambda: {"device": "CPU", "versions": {"jax": code.get("jax", "1")}},
        lambda: {name: functools.partial(job, name) for name in ("a, one", "a, two", "b")},
        lambda rows: ["b is there"] if len(rows) > 2 else [],
    )
    monkeypatch.setattr("benchmarks.lib.benchmark.source", lambda: code["checksum"])
    return benchmark._replace(measure=rows, render=lambda r: f"{len(r['rows'])} rows"), measured, code


def test_a_row_is_stored_when_it_is_measured_and_a_second_run_goes_on(by_row):
    entry, measured, code = by_row

    def stored(field):
        return [row[field] for row in json.loads(entry.results.read_text())["rows"]]

    code["stops_at"] = "a, two"
    with pytest.raises(KeyboardInterrupt):
        run_benchmark(entry)
    assert stored("row") == ["a, one"]
    code["stops_at"] = None
    assert run_benchmark(entry) == 1  # all rows together miss a target
    assert measured == stored("row") == ["a, one", "a, two", "b"]
    run_benchmark(entry)
    assert len(measured) == 3
    code["checksum"] = "second"
    run_benchmark(entry, rows="a, *")
    assert measured[3:] == ["a, one", "a, two"] and stored("code") == ["second", "second", "first"]


def test_rows_of_other_versions_are_named_below_the_tables(by_row):
    entry, measured, code = by_row
    run_benchmark(entry)
    code["jax"] = "2"
    run_benchmark(entry, rows="b")
    assert measured[3:] == ["b"]
    assert "3 rows\n\nCPU; jax 2.\n2 older rows: jax 1.\n" in entry.page.read_text()


def test_an_entry_that_is_measured_as_a_whole_has_no_rows_to_choose(benchmark):
    with pytest.raises(SystemExit, match="cpu some is measured as a whole, without --rows"):
        run_benchmark(benchmark, rows="a*")


@pytest.mark.parametrize("name", ENTRIES)
def test_stored_results_of_every_entry_stand_on_its_page(name, monkeypatch):
    """Rendered from the JSON, the tables are those of the page; the JSON names the command that made it."""
    benchmark = runner.load(name)
    results = json.loads(benchmark.results.read_text())
    monkeypatch.setattr(h100_fsdp, "SCALING", SimpleNamespace(write_text=lambda text: None))
    begin, end = tables.markers(name)
    assert benchmark.name == name and results["command"] == f"python -m benchmarks {name}"
    text = tables.with_versions(benchmark.render(results), results)
    assert f"{begin}\n{text}\n{end}" in benchmark.page.read_text()


def test_the_command_line_chooses_entries(monkeypatch, capsys):
    runs, processes = [], []

    def run_here(benchmark, **flags):
        runs.append((benchmark.name, flags))
        return 0

    def run_process(command, cwd):
        processes.append(command[3:])
        return SimpleNamespace(returncode=len(processes) == 2)

    monkeypatch.setattr(runner, "run", run_here)
    monkeypatch.setattr(runner.subprocess, "run", run_process)
    assert runner.main(["cpu", "step", "--table"]) == 0
    assert runs == [("cpu step", {"table": True, "tiny": False, "rows": "*"})] and processes == []
    assert runner.main(["cpu", "--tiny"]) == 1  # the second of four fails
    assert processes == [["cpu", name, "--tiny"] for name in ("autocast", "monitor", "reduce_dtype", "step")]
    assert capsys.readouterr().out.endswith("--- 3 of 4 passed\nfailed: cpu monitor\n")
    assert runner.main(["--table"]) == 0
    assert len(processes) == 4 + len(runner.entries())
    assert runner.main(["cpu", "stop"]) == runner.main([]) == 2
    assert "got: cpu stop" in capsys.readouterr().err


def test_help_lists_every_entry(capsys):
    with pytest.raises(SystemExit):
        runner.main(["--help"])
    text = capsys.readouterr().out
    assert all(line and f"    {name} " in text for name, line in runner.entries().items())


@pytest.mark.thorough(0)
@pytest.mark.parametrize("name", ["cpu autocast", "cpu reduce_dtype", "cpu step"])
def test_an_entry_measures_in_tiny_sizes(name, monkeypatch):
    monkeypatch.setattr(cpu, "COMPILATIONS", 1)
    entry = runner.load(name)
    with jax.numpy_rank_promotion("allow"):
        results = entry.measure_tiny()
    assert len(results["rows"]) > 1 and entry.render(results).count("\n| ") > len(results["rows"]) / 4
    numbers = [value for row in results["rows"] for value in row.values() if isinstance(value, float)]
    assert np.isfinite(numbers).all()


# --- the optimizer's side of a step -----------------------------------------------------------------------------------

BY_HAND = "by hand, select"
PROGRAMS = {program.name: program for program in cpu.programs()}
SAME_JOB = [name for name, program in PROGRAMS.items() if program.dtype == jnp.float16]


@functools.cache
def run(name, *, overflow=False):
    """(params, state) after three steps on a tiny tree."""
    program = PROGRAMS[name]
    params, opt_state, grads = cpu.start(program, cpu.make_params(4, 8))
    if overflow:
        grads["layer_000"]["bias"] = grads["layer_000"]["bias"].at[0].set(jnp.inf)
    step = jax.jit(program.step)
    for _ in range(3):
        params, opt_state = step(params, opt_state, grads)
    return params, opt_state


@pytest.mark.thorough(0)
@pytest.mark.parametrize("name", [name for name in PROGRAMS if name != BY_HAND])
def test_every_program_takes_the_same_step(name):
    """Masters agree within the rounding of a norm that is summed in another order, other params within their own."""
    dtype, (params, opt_state) = PROGRAMS[name].dtype, run(name)
    assert all(x.dtype == dtype for x in jax.tree.leaves(params))
    masters = run(BY_HAND)[1].masters
    if name in SAME_JOB:
        own = jaxmp.get_master_params(opt_state, params) if name.startswith("jaxmp") else opt_state.masters
        assert_close(own, masters, rtol=1e-6, atol=1e-8)
        assert_exact(params, jax.tree.map(lambda m: m.astype(jnp.float16), own))
    else:
        weights = {  # without scales of fp8
            layer: {leaf: params[layer][leaf].astype(F32) for leaf in leaves} for layer, leaves in masters.items()
        }
        tolerance = max(float(jnp.finfo(dtype).eps), 1e-4)
        assert_close(weights, masters, rtol=tolerance, atol=tolerance)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("name", SAME_JOB)
def test_the_same_job_skips_an_overflow(name):
    assert len(SAME_JOB) == 5 and set(cpu.BY_HAND) < set(SAME_JOB)
    params = cpu.make_params(4, 8)
    assert_moved(run(name, overflow=True)[0], jax.tree.map(lambda p: p.astype(jnp.float16), params))


# --- autocast, a monitor, recipes -------------------------------------------------------------------------------------

IMAGES, WORDS = jax.ShapeDtypeStruct((2, 8, 8, 3), F32), jax.ShapeDtypeStruct((2, 4, 8), F32)
LABELS = jax.ShapeDtypeStruct((2,), jnp.int32)
SIZES = {"batch": 2, "length": 8, "width": 16, "layers": 1, "heads": 2, "vocabulary": 32}
JOBS = {
    "transformer": autocast_programs.language_job("scan", **SIZES, scan=True),
    "cnn": autocast_programs.Job("cnn", functools.partial(autocast_programs.CNN, (8,)), IMAGES, LABELS),
    "lstm": autocast_programs.Job("lstm", functools.partial(autocast_programs.LSTM, 8), WORDS, LABELS),
}


@pytest.mark.thorough(0)
@pytest.mark.parametrize("name", JOBS)
def test_by_hand_and_autocast_multiply_in_16_bits_alike(name):
    """The same number of matmuls and convolutions, each in float16; gradients have the float32 of the params."""
    job, matmuls = JOBS[name], {}
    variables = jax.eval_shape(lambda: autocast_programs.initial(job))
    for kind in autocast_programs.KINDS:
        program = autocast_programs.program(job, kind, jnp.float16)
        jaxpr, ((loss, _), grads) = jax.make_jaxpr(program, return_shape=True)(variables, job.x, job.y)
        assert loss.dtype == F32 and all(g.dtype == F32 for g in jax.tree.leaves(grads))
        matmuls[kind] = re.findall(r":(\w+)\[[^\]]*\] = (?:dot_general|conv_general_dilated)", str(jaxpr))
    dtypes = {kind: set(names) for kind, names in matmuls.items()}
    assert dtypes.pop(autocast_programs.UNCAST) == {"f32"}
    assert set(map(frozenset, dtypes.values())) == {frozenset({"f16"})}
    assert len(set(map(len, matmuls.values()))) == 1


def test_autocast_is_judged_by_both_targets():
    row = {"program": "jaxmp.autocast", "dtype": "bf16", "step_over_by_hand": 1.05, "compile_over_uncast": 1.3}
    assert cpu_autocast.missed(row) == []
    assert cpu_autocast.missed(row | {"program": "by hand", "step_over_by_hand": 2.0}) == []
    slow = cpu_autocast.missed(row | {"step_over_by_hand": 1.2, "compile_over_uncast": 1.5})
    assert slow == [
        "bf16: a step of 1.2 of by hand, over 1.05",
        "bf16: trace + lower + compile of 1.5 of uncast, over 1.3",
    ]


def test_a_watched_step_misses_its_target_by_time():
    row = {"program": cpu_monitor.STATS, "step_ms": 1.0, "of_plain": 1.5, "compile_s": 1.0}
    row["missed"] = cpu_monitor.missed(row)
    assert " over 1.03" in row["missed"][0] and "no: " in cpu_monitor.render({"rows": [row]})
    assert not cpu_monitor.missed(row | {"of_plain": 1.02})


def test_every_recipe_is_measured_and_outliers_cost_one_scale_most():
    stored = json.loads(recipes.BENCHMARK.results.read_text())["rows"]
    y = {(row["recipe"], row["data"]): row["y"] for row in stored}
    assert set(y) == {(name, data) for name in recipes.RECIPES for data in recipes.DATA}
    one, rowwise = list(recipes.RECIPES)[:3:2]
    assert y[one, "normal"] > 28 and y[one, "outliers"] < 10 < 28 < y[rowwise, "outliers"]
    x, w, _ = recipes.tensors("normal", 512, 512)
    product = jax.jit(lambda x, w: fp8.dot_general(x, w, recipes.MATMUL, recipe=recipes.RECIPES[rowwise]))(x, w)
    sqnr = recipes.sqnr_of_rows(product, x.astype("f8") @ w.astype("f8"))
    assert sqnr == pytest.approx(y[rowwise, "normal"], abs=0.1)

"""The programs of `make bench` do what their rows say: on a tiny tree, without looking at a clock."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp
from benchmarks.cpu import autocast as cpu_autocast, monitor as cpu_monitor, step as cpu
from benchmarks.lib import tables
from benchmarks.programs import autocast as autocast_programs
from helpers import assert_bitwise, assert_close

F32 = np.float32
PROGRAMS = {program.name: program for program in cpu.programs()}
pytestmark = pytest.mark.newest
SAME_JOB = [name for name, program in PROGRAMS.items() if program.dtype == jnp.float16]


def run(name, *, overflow=False):
    """(params, state) after three steps."""
    program = PROGRAMS[name]
    params, opt_state, grads = cpu.start(program, cpu.make_params(4, 8))
    if overflow:
        grads["layer_000"]["bias"] = grads["layer_000"]["bias"].at[0].set(jnp.inf)
    step = jax.jit(program.step)
    for _ in range(3):
        params, opt_state = step(params, opt_state, grads)
    return params, opt_state


def test_four_programs_do_the_same_job():
    assert len(SAME_JOB) == 4 and set(cpu.BY_HAND) < set(SAME_JOB)


@pytest.mark.parametrize("name", SAME_JOB)
def test_the_same_job_ends_in_the_same_params(name):
    """Masters within the rounding of one norm, which is summed in another order; params are those masters, rounded."""
    params, opt_state = run(name)
    _, by_hand = run("by hand, select")
    masters = jaxmp.get_master_params(opt_state, params) if name.startswith("jaxmp") else opt_state.masters
    assert_close(masters, by_hand.masters, rtol=1e-6, atol=1e-8)
    assert_bitwise(params, jax.tree.map(lambda m: m.astype(jnp.float16), masters))


@pytest.mark.parametrize("name", [name for name in PROGRAMS if name not in SAME_JOB])
def test_the_other_jobs_take_the_same_step(name):
    """In float32 or bfloat16, within the rounding of their params."""
    program, (params, _) = PROGRAMS[name], run(name)
    assert all(x.dtype == program.dtype for x in jax.tree.leaves(params))
    tolerance = max(float(jnp.finfo(program.dtype).eps), 1e-4)
    _, by_hand = run("by hand, select")
    assert_close(jax.tree.map(lambda p: p.astype(F32), params), by_hand.masters, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", SAME_JOB)
def test_the_same_job_skips_an_overflow(name):
    params = cpu.make_params(4, 8)
    assert_bitwise(run(name, overflow=True)[0], jax.tree.map(lambda p: p.astype(jnp.float16), params))


def test_results_become_tables_between_their_markers(tmp_path, monkeypatch):
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{cpu.MARKERS[0]}\nold\n{cpu.MARKERS[1]}\nafter\n")
    monkeypatch.setattr(tables, "README", readme)
    monkeypatch.setattr(cpu, "COMPILATIONS", 1)
    rows = cpu.measure(2, 8, 1)
    tables.write_readme(cpu.MARKERS, cpu.table(rows), {"device": "CPU", "versions": {"jax": "1"}})
    text = readme.read_text()
    assert [row["program"] for row in rows] == list(PROGRAMS)
    assert all(text.count(f"| {name} ") == 1 for name in PROGRAMS)
    assert text.startswith("before\n") and text.endswith("CPU; jax 1.\n" + cpu.MARKERS[1] + "\nafter\n")


# autocast

IMAGES, WORDS = jax.ShapeDtypeStruct((2, 8, 8, 3), F32), jax.ShapeDtypeStruct((2, 4, 8), F32)
LABELS = jax.ShapeDtypeStruct((2,), jnp.int32)
SIZES = {"batch": 2, "length": 8, "width": 16, "layers": 1, "heads": 2, "vocabulary": 32}
JOBS = {
    "transformer": autocast_programs.language_job("transformer", **SIZES),
    "scan": autocast_programs.language_job("scan", **SIZES, scan=True),
    "cnn": autocast_programs.Job("cnn", functools.partial(autocast_programs.CNN, (4,)), IMAGES, LABELS),
    "lstm": autocast_programs.Job("lstm", functools.partial(autocast_programs.LSTM, 8), WORDS, LABELS),
}


@pytest.mark.parametrize("name", JOBS)
def test_by_hand_and_autocast_multiply_in_16_bits_alike(name):
    """As many matmuls and convolutions, each in float16, and gradients in the dtypes of float32 params."""
    job, matmuls = JOBS[name], {}
    variables = jax.eval_shape(lambda: autocast_programs.initial(job))
    for kind in autocast_programs.KINDS:
        run = autocast_programs.program(job, kind, jnp.float16)
        jaxpr, shapes = jax.make_jaxpr(run, return_shape=True)(variables, job.x, job.y)
        (loss, _), grads = shapes
        assert loss.dtype == F32 and all(g.dtype == F32 for g in jax.tree.leaves(grads))
        matmuls[kind] = re.findall(r":(\w+)\[[^\]]*\] = (?:dot_general|conv_general_dilated)", str(jaxpr))
    dtypes = {kind: set(found) for kind, found in matmuls.items()}
    assert dtypes.pop(autocast_programs.UNCAST) == {"f32"}
    assert set(map(frozenset, dtypes.values())) == {frozenset({"f16"})}
    assert len(set(map(len, matmuls.values()))) == 1


def test_autocast_is_timed_beside_by_hand_and_uncast(monkeypatch):
    monkeypatch.setattr(cpu_autocast, "PROGRAMS", cpu_autocast.PROGRAMS[:3])

    def dense(cast=None):  # compiled in no time
        return nn.Dense(4, dtype=cast.dtype if cast else None)

    job = autocast_programs.Job("dense", dense, jax.ShapeDtypeStruct((2, 8), F32), LABELS)
    rows = cpu_autocast.measure(job, rounds=1, steps=1, compilations=1)
    assert [row["program"] for row in rows] == ["uncast", "by hand", "jaxmp.autocast"]
    assert rows[1]["step_over_by_hand"] == rows[1]["compile_over_by_hand"] == rows[0]["compile_over_uncast"] == 1.0
    assert all(row["step_ms"] > 0 and row["compile_s"] > 0 for row in rows)
    assert cpu_autocast.table(rows).count("jaxmp.autocast") == 1


def test_autocast_is_judged_by_both_targets():
    row = {"program": "jaxmp.autocast", "dtype": "bf16", "step_over_by_hand": 1.05, "compile_over_uncast": 1.3}
    assert cpu_autocast.missed(row) == []
    assert cpu_autocast.missed(row | {"program": "by hand", "step_over_by_hand": 2.0}) == []
    slow = cpu_autocast.missed(row | {"step_over_by_hand": 1.2, "compile_over_uncast": 1.5})
    assert slow == [
        "bf16: a step of 1.2 of by hand, over 1.05",
        "bf16: trace + lower + compile of 1.5 of uncast, over 1.3",
    ]


def test_a_watched_step_misses_its_target_by_time_and_by_bits():
    row = {"program": cpu_monitor.STATS, "step_ms": 1.0, "of_plain": 1.5, "compile_s": 1.0, "same_bits": False}
    row["missed"] = cpu_monitor.missed(row, rounds=3)
    assert [" over 1.03" in row["missed"][0], "other params" in row["missed"][1]] == [True, True]
    assert "no: " in cpu_monitor.table({"rows": [row]})
    assert not cpu_monitor.missed(row | {"of_plain": 1.02, "same_bits": True}, rounds=3)

"""The programs of `make bench` do what their rows say: on a tiny tree, without looking at a clock."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmp
from helpers import assert_bitwise, assert_close

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import cpu
import tables

F32 = np.float32
PROGRAMS = {program.name: program for program in cpu.programs()}
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

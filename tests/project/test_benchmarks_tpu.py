"""`python -m benchmarks tpu`: what is counted, and the smallest program of each kind where libtpu is installed."""

import importlib.util
from types import SimpleNamespace

import pytest

from benchmarks.tpu import steps

needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
HLO = """
%fused (p.1: f8e4m3fn[8,8], p.2: f8e5m2[8,8]) -> f32[8,8] {
  %p.1 = f8e4m3fn[8,8]{1,0:T(8,128)(4,1)} parameter(0)
  %p.2 = f8e5m2[8,8]{1,0:T(8,128)(4,1)} parameter(1)
  ROOT %convolution.3 = f32[8,8]{1,0:T(8,128)} convolution(%p.1, /*index=1*/%p.2), dim_labels=bf_io->bf
}
ENTRY %main (a: bf16[8,8]) -> f32[8,8] {
  %a = bf16[8,8]{1,0} parameter(0)
  %dot.1 = bf16[8,8]{1,0} dot(%a, %a), lhs_contracting_dims={1}
  %g = f32[8,8]{1,0} all-gather-start(%dot.1)
}
"""


def test_matmuls_are_counted_by_what_they_read():
    assert steps.matmuls(SimpleNamespace(as_text=lambda: HLO)) == {"f8e5m2 x f8e4m3fn": 1, "bf16": 1}


IN_TWO_MEMORIES = """
ENTRY %main (a: bf16[8,8], m: f32[8,8]) -> f32[8,8] {
  %a = bf16[8,8]{1,0:T(8,128)} parameter(0)
  %m = f32[8,8]{1,0:T(8,128)} parameter(1)
  %flat = bf16[64]{0:T(8,128)} bitcast(%a)
  %slice-start = ((bf16[64]{0}), bf16[32]{0:S(1)}, s32[]{:S(2)}) slice-start(%flat), slice={[0:32]}
  %slice-done = bf16[32]{0:S(1)} slice-done(%slice-start)
  %copy-start = (f32[8,8]{1,0:S(1)}, f32[8,8]{1,0}, u32[]{:S(2)}) copy-start(%m)
  %copy-done = f32[8,8]{1,0:S(1)} copy-done(%copy-start)
  ROOT %step = f32[8,8]{1,0:T(8,128)} fusion(%slice-done, %copy-done, %m), kind=kLoop, calls=%fused
}
"""


def test_bytes_of_hbm_are_those_of_no_other_memory():
    prefetched, read, written = 2 * 32 + 4 * 64, 4 * 64, 4 * 64
    program = SimpleNamespace(as_text=lambda: IN_TWO_MEMORIES)
    assert steps.hbm_bytes(program) == prefetched + read + written
    with pytest.raises(ValueError, match="without loops and branches"):
        steps.hbm_bytes(SimpleNamespace(as_text=lambda: IN_TWO_MEMORIES.replace("fusion(", "while(")))


def row(program, **fields):
    about = {"group": "optimizer", "chip": "v6e", "ours": True, "params": 2**20, "not_in_place_bytes": 2**21}
    about |= {"scratch_bytes": 0, "bytes_per_param": 30.0, "xla_bytes_per_param": 38.0, "bytes": 1e6, "host_bytes": 0}
    return about | {"program": program, "matmuls": {}, "collectives": {}} | fields


def test_a_row_misses_its_targets_in_words():
    hand = row(steps.BY_HAND, ours=False, bytes_per_param=30.0)
    others = [row("near", bytes_per_param=33.0), row("far", bytes_per_param=60.0)]
    rows = [hand, *others, row("copies", not_in_place_bytes=2**23), row("broken", error="XlaRuntimeError: no")]
    missed = {r["program"]: steps.missed(r, rows) for r in rows}
    assert missed[steps.BY_HAND] == missed["near"] == []
    assert missed["far"] == ["2.0 times the bytes by hand"]
    assert missed["copies"] == ["8 MiB are not updated in place"]
    assert missed["broken"] == ["XlaRuntimeError: no"]
    step = row("linen", group="step", params=None, bytes_per_param=None, matmuls={"bf16": 3}, not_in_place_bytes=0)
    text = steps.render({"rows": [r | {"missed": steps.missed(r, rows)} for r in (*rows, step)]})
    assert "no: XlaRuntimeError: no" in text and "3 bf16" in text and "| 33.0 " in text


def test_every_kind_of_program_is_compiled():
    cases = steps.cases()
    assert {case.group for case in cases} == {"optimizer", "step", "fsdp", "offload"}
    names = [case.name for case in cases]
    assert len(set(names)) == len(names) and set(steps.ELSEWHERE) <= set(names)
    assert {case.name for case in cases if not case.is_ours} >= {steps.FLOAT32, steps.BY_HAND, "linen example, fp32"}


def small(kind):
    """The smallest whole step of a kind, as a case."""
    from benchmarks.lib.examples import load, train

    sizes = {"width": 32, "layers": 1, "heads": 2, "seq_len": 16, "batch_size": 2}
    linen, nnx = train.Config(**sizes), load("train_nnx").Config(**sizes, dropout=0.0)
    build = {
        "offload": lambda mesh: steps.offload_step(mesh, 256, 2),
        "fsdp": lambda mesh: steps.fsdp_step("bf16", mesh, 1024, 2),  # smaller gradients are all-reduced
        "linen": lambda mesh: steps.linen_step("fp8", mesh, linen),
        "nnx": lambda mesh: steps.nnx_step("fp8", mesh, nnx),
    }
    return steps.Case("step", kind, steps.EIGHT if kind == "fsdp" else steps.ONE, build[kind])


@needs_libtpu
@pytest.mark.optimized
@pytest.mark.parametrize("kind", ["linen", "nnx", "fsdp", "offload"])
def test_the_smallest_program_of_each_kind_compiles(kind):
    counts = steps.count(small(kind), "v6e")
    assert "error" not in counts, counts["error"]
    if kind in ("linen", "nnx"):
        assert any("f8" in dtypes for dtypes in counts["matmuls"])
    if kind == "fsdp":
        assert counts["collectives"]["all-gather"] >= 1 and counts["collectives"]["reduce-scatter"] >= 1
    if kind == "offload":
        assert counts["host_bytes"] >= 12 * 2 * 256 * 256


# Bytes of HBM for each param. By hand, with float32 masters and moments, they are 30.
MOST_BYTES = {
    steps.FLOAT32: 32.1,
    "jaxmp, bf16": 32.1,
    "jaxmp, fp16": 32.1,
    "jaxmp, bf16, 16 bits of remainder": 36.1,
    "jaxmp, bf16, int8 moments": 70.2,
    "jaxmp.fused_adamw, bf16": 30.1,
    "jaxmp.fused_adamw, bf16, 16 bits of remainder": 36.1,
    "jaxmp.fused_adamw, bf16, 8 bits of remainder, int8 moments": 32.4,
}


@needs_libtpu
@pytest.mark.optimized
@pytest.mark.parametrize("program", MOST_BYTES)
def test_no_step_moves_more_bytes_than_it_did(program):
    (case,) = [case for case in steps.cases() if case.name == program]
    counts = steps.count(case, "v6e")
    assert "error" not in counts, counts["error"]
    assert counts["bytes_per_param"] <= MOST_BYTES[program]


@needs_libtpu
@pytest.mark.optimized
@pytest.mark.parametrize("chip", steps.ONE)
def test_libtpu_knows_the_chips(chip):
    (case,) = [case for case in steps.optimizer_cases(256) if case.name == steps.BY_HAND]
    assert "error" not in steps.count(case, chip)


def test_a_topology_that_is_not_there_is_an_error_in_the_row():
    case = steps.optimizer_cases(256)[0]._replace(topologies={"v0": "v0:1x1"})
    assert steps.count(case, "v0")["error"]

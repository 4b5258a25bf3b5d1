"""`python -m benchmarks tpu`: what is counted, and the smallest program of each kind where libtpu is installed."""

import functools
import importlib.util
from types import SimpleNamespace

import pytest

from benchmarks.lib import trees
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
    about |= {
        "scratch_bytes": 0,
        "bytes_per_param": 30.0,
        "xla_bytes_per_param": 38.0,
        "bytes": 1e6,
        "host_bytes": 0,
        "matmuls": {},
    }
    return about | {"program": program, "collectives": {}} | fields


def test_a_row_misses_its_targets_in_words():
    hand = row(steps.BY_HAND, ours=False, bytes_per_param=30.0)
    others = [row("near", bytes_per_param=33.0), row("far", bytes_per_param=60.0)]
    rows = [hand, *others, row("copies", not_in_place_bytes=2**23), row("broken", error="XlaRuntimeError: no")]
    found = {r["program"]: steps.missed(r, rows) for r in rows}
    assert found[steps.BY_HAND] == found["near"] == []
    assert found["far"] == ["2.0 times the bytes by hand"]
    assert found["copies"] == ["8 MiB are not updated in place"]
    assert found["broken"] == ["XlaRuntimeError: no"]
    step = row("linen", group="step", params=None, bytes_per_param=None, matmuls={"bf16": 3}, not_in_place_bytes=0)
    text = steps.render({"rows": [r | {"missed": steps.missed(r, rows)} for r in (*rows, step)]})
    assert "no: XlaRuntimeError: no" in text and "3 bf16" in text and "| 33.0 " in text


def test_every_kind_of_program_is_compiled():
    cases = steps.cases()
    assert {case.group for case in cases} == {"optimizer", "step", "fsdp", "offload"}
    names = [case.name for case in cases]
    assert len(set(names)) == len(names) and set(steps.ELSEWHERE) <= set(names)
    assert {name.partition(",")[0] for name in names} >= {"linen example", "nnx example", "jaxmp.fused_adamw"}


def small_config(kind):
    from benchmarks.lib.examples import load, train

    sizes = {"width": 32, "layers": 1, "heads": 2, "seq_len": 16, "batch_size": 2}
    return train.Config(**sizes) if kind == "linen" else load("train_nnx").Config(**sizes, dropout=0.0)


def small(kind):
    """The smallest program of a kind, as a case."""
    shapes = steps.two_leaves(256)
    if kind == "offload":
        return steps.Case("offload", kind, steps.ONE, lambda mesh: steps.offload_step(mesh, 256, 2))
    if kind == "fsdp":
        # Smaller gradients are all-reduced.
        return steps.Case("fsdp", kind, steps.EIGHT, lambda mesh: steps.fsdp_step("bf16", mesh, 1024, 2))
    if kind in ("linen", "nnx"):
        build = {"linen": steps.linen_step, "nnx": steps.nnx_step}[kind]
        return steps.Case("step", kind, steps.ONE, lambda mesh: build("fp8", mesh, small_config(kind)))
    build = functools.partial(steps.optimizer_step, *steps.optimizers()[kind], shapes)
    return steps.Case("optimizer", kind, steps.ONE, build, trees.size(shapes))


@needs_libtpu
@pytest.mark.optimized
@pytest.mark.parametrize(
    "kind", [steps.FLOAT32, steps.BY_HAND, "jaxmp, bf16", "jaxmp.fused_adamw, bf16", "linen", "nnx", "fsdp", "offload"]
)
def test_the_smallest_program_of_each_kind_compiles(kind):
    found = steps.count(small(kind), "v6e")
    assert "error" not in found, found["error"]
    assert found["bytes"] > 0
    if kind == steps.FLOAT32:  # gradients twice (the norm), param and two moments read and written: 48, and a bias
        assert found["xla_bytes_per_param"] == pytest.approx(48, rel=0.15)
    if kind in ("linen", "nnx"):
        assert any("f8" in dtypes for dtypes in found["matmuls"])
    if kind == "fsdp":
        assert found["collectives"]["all-gather"] >= 1 and found["collectives"]["reduce-scatter"] >= 1
    if kind == "offload":
        assert found["host_bytes"] >= 12 * 2 * 256 * 256


# Bytes of HBM for each param. By hand, with float32 masters and moments, they are 30.
MOST_BYTES = {
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
    case = next(case for case in steps.cases() if case.name == program)
    found = steps.count(case, "v6e")
    assert "error" not in found, found["error"]
    assert found["bytes_per_param"] <= MOST_BYTES[program]


@needs_libtpu
@pytest.mark.optimized
@pytest.mark.parametrize("chip", steps.ONE)
def test_libtpu_knows_the_chips(chip):
    found = steps.count(small(steps.BY_HAND), chip)
    assert "error" not in found, found["error"]


def test_a_topology_that_is_not_there_is_an_error_in_the_row():
    case = small(steps.BY_HAND)._replace(topologies={"v0": "v0:1x1"})
    assert steps.count(case, "v0")["error"]

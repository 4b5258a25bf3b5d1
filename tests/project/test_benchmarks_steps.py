"""`python -m benchmarks h100 steps`: its programs are traced in small sizes, and HLO by hand is counted."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.h100 import steps as h100_steps
from benchmarks.programs import steps
from matmul_dtypes import matmuls_in

TINY = {kind: steps.Stack(kind, 256, 2, sequences=1, length=16) for kind in ("GPT", "Llama")}
CASES = [
    steps.Step(TINY[kind], precision, framework, remat, flash=False)
    for kind in TINY
    for framework in steps.FRAMEWORKS
    for precision in steps.PRECISIONS
    for remat in (False, True)
]


@pytest.mark.thorough(1)
@pytest.mark.parametrize("step", CASES, ids=lambda step: step.row.replace(", ", "-").replace(" ", "_"))
def test_every_step_keeps_its_state_as_it_is_and_multiplies_in_16_bits(step):
    """All matmuls are in 16 bits; in fp8 all but attention's, with 3 for each matrix.

    (Attention by XLA, in place of cuDNN's, multiplies the float32 gradients of its logits by arrays of 16 bits.)
    """
    program = steps.program(step)
    state = jax.eval_shape(program.init)
    jaxpr, (after, loss) = jax.make_jaxpr(program.run, return_shape=True)(state, steps.example(step))
    assert loss.shape == () and loss.dtype == jnp.float32
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    found = matmuls_in(jaxpr)
    assert found and "float32" not in found, found


def test_rows_have_names_of_their_own_and_the_first_are_those_to_compare_with():
    found = [step.row for step in steps.steps()]
    assert len(found) == len(set(found)) == 112
    assert found[:3] == ["GPT, linen, bf16 by hand", "GPT, linen, bf16", "GPT, linen, fp8 delayed"]


PROGRAM = """
%body (p: f32[1024]) -> f32[1024] {
  %p = f32[1024]{0} parameter(0)
  ROOT %n = f32[1024]{0} negate(%p), metadata={op_name="jit(run)/jvp(Model)/layer_0/norm_1/neg"}
}

ENTRY %main (x: bf16[64,32], w: bf16[32,16], q: f8e4m3fn[64,32], k: f8e4m3fn[16,32], s: f32[1024]) -> f32[1024] {
  %x = bf16[64,32]{1,0} parameter(0)
  %w = bf16[32,16]{1,0} parameter(1)
  %q = f8e4m3fn[64,32]{1,0} parameter(2)
  %k = f8e4m3fn[16,32]{1,0} parameter(3)
  %s = f32[1024]{0} parameter(4)
  %a = (bf16[64,16]{1,0}, s8[4194304]{0}) custom-call(%x, %w), custom_call_target="__cublas$lt$matmul", backend_config={"lhs_contracting_dimensions":["1"]}
  %b = (bf16[64,16]{1,0}, s8[4194304]{0}) custom-call(%q, %k), custom_call_target="__cublas$lt$matmul$f8", backend_config={"lhs_contracting_dimensions":["1"]}
  ROOT %c = f32[1024]{0} fusion(%s), kind=kLoop, calls=%body, metadata={op_name="jit(run)/transpose(jvp(Model))/layer_0/norm_1/neg"}
}
"""  # noqa: E501


def test_gemms_and_the_rest_are_counted_and_named(monkeypatch):
    """Scratch of a GEMM is no traffic; a GEMM takes its multiplications or its bytes, whatever takes longer."""
    memory = SimpleNamespace(temp_size_in_bytes=2**20, alias_size_in_bytes=0)
    compiled = SimpleNamespace(as_text=lambda: PROGRAM, memory_analysis=lambda: memory)
    found = h100_steps.counts(compiled)
    assert (found["kernels"], found["gemms"], found["fp8_gemms"]) == (3, 2, 1)
    monkeypatch.setattr(h100_steps, "MEMORY", 1e3)  # so slow that bytes decide
    slow = h100_steps.counts(compiled)
    moved = (64 * 32 + 32 * 16 + 64 * 16) * 2 + (64 * 32 + 16 * 32 + 64 * 16 * 2)
    np.testing.assert_allclose(slow["gemm_ms"], moved, rtol=1e-6)
    np.testing.assert_allclose(slow["rest_ms"], 2 * 4 * 1024, rtol=1e-6)
    np.testing.assert_allclose(slow["ms"], slow["gemm_ms"] + slow["rest_ms"] + slow["launch_ms"], rtol=1e-6)
    monkeypatch.setattr(h100_steps, "IN_16_BITS", 1.0)  # multiplications decide
    monkeypatch.setattr(h100_steps, "IN_FP8", 2.0)
    np.testing.assert_allclose(h100_steps.counts(compiled)["gemm_ms"], 1e3 * 2 * 64 * 32 * 16 * 1.5, rtol=1e-6)
    assert found["largest"] == [{"kernel": "c", "layer": "layer_0/norm_1, backward", "mib": 0.0}]


def test_attention_multiplies_the_causal_half():
    q = "bf16[4,2048,16,128]{3,2,1,0}"
    forward = h100_steps.work_of("__cudnn$fmhaSoftmax", q, [q, q, q], "")
    assert forward == 2 * 2 * 4 * 16 * 2048 * 2048 * 128 / 2
    assert h100_steps.work_of("__cudnn$fmhaSoftmaxBackward", q, [q] * 6, "") == 2.5 * forward
    assert h100_steps.work_of("mosaic_gpu_v2", q, [q], "") == 0


@pytest.mark.parametrize(
    ("op_name", "layer"),
    [
        ("jit(run)/jvp(Model)/layer_0/qkv/dot_general", "layer_0/qkv"),
        ("jit(run)/jaxmp.autocast(bfloat16)/transpose(jvp(Model/layer_1/down/down/Fp8))/mul", "layer_1/down, backward"),
        ("jit(run)/transpose(jvp(M))/checkpoint/rematted_computation/layer_0/up/add", "layer_0/up, recomputed"),
        ("jit(run)/jvp(NnxModel/layer_1/1)/sub", "layer_1/sub"),
        ("jit(run)/optimizer/jaxmp.optimizer/mul", "optimizer"),
        ("jit(run)/transpose(jvp())/mul", "mul, backward"),
        ("", "?"),
    ],
)  # fmt: skip
def test_an_operation_is_named_by_its_layer(op_name, layer):
    assert h100_steps.layer_of(op_name) == layer


def row(precision, ms, temp_mib=100.0, remat=False):
    return {"row": precision, "stack": "GPT", "framework": "linen", "remat": remat, "devices": 1} | {
        "precision": precision,
        "ms": ms,
        "temp_mib": temp_mib,
    }


def test_steps_are_judged_beside_by_hand_and_bf16():
    hand, bf16, fp8 = row(steps.BY_HAND, 10.0), row("bf16", 10.1), row("fp8 delayed", 7.5)
    assert h100_steps.missed([hand, bf16, fp8]) == h100_steps.missed([fp8]) == []
    assert h100_steps.missed([hand, bf16 | {"ms": 10.5}, row("fp8 delayed", 8.0, 105.0)]) == [
        "bf16: 1.050 of by hand, over 1.02",
        "fp8 delayed: 1.25 times as fast as by hand, below 1.32",
    ]
    hand, bf16, fp8 = (
        row(name, 9.0, mib, remat=True) for name, mib in ((steps.BY_HAND, 9), ("bf16", 9), ("fp8 delayed", 10))
    )
    assert h100_steps.missed([hand, bf16, fp8]) == ["fp8 delayed: 1.11 of the temp of bf16, over 1"]

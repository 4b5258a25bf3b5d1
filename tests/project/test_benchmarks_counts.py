"""What entries of `h100` count: `benchmarks/lib/aot.py` on programs by hand, and the traces of whole steps."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.h100 import autocast as h100_autocast, steps as h100_steps
from benchmarks.lib import aot
from benchmarks.programs import steps
from matmul_dtypes import matmuls_in

# A kernel that reads a gradient and a master, and updates the master and the param in place without reading the param
UPDATE = """
ENTRY %main (grad: f16[8], param: f16[8], master: f32[8]) -> (f16[8], f32[8]) {
  %grad = f16[8]{0} parameter(0)
  %param = f16[8]{0} parameter(1)
  %master = f32[8]{0} parameter(2)
  ROOT %run = (f16[8]{0}, f32[8]{0}) custom-call(%grad, %param, %master), custom_call_target="mosaic_gpu_v2"
}
"""

# The same after a mean over two devices
MEAN = """
%halve (p: f16[8]) -> f16[8] {
  %p = f16[8]{0} parameter(0)
  %half = f16[] constant(0.5)
  %halves = f16[8]{0} broadcast(%half), dimensions={}
  ROOT %m = f16[8]{0} multiply(%p, %halves)
}

ENTRY %main (grad: f16[8], param: f16[8], master: f32[8]) -> (f16[8], f32[8]) {
  %grad = f16[8]{0} parameter(0)
  %param = f16[8]{0} parameter(1)
  %master = f32[8]{0} parameter(2)
  %sum = f16[8]{0} all-reduce(%grad), to_apply=%add
  %mean = f16[8]{0} fusion(%sum), kind=kLoop, calls=%halve
  ROOT %run = (f16[8]{0}, f32[8]{0}) custom-call(%mean, %param, %master), custom_call_target="mosaic_gpu_v2"
}
"""


def program_of(text):
    memory = SimpleNamespace(temp_size_in_bytes=0, alias_size_in_bytes=0)
    return SimpleNamespace(as_text=lambda: text, memory_analysis=lambda: memory)


def report(text, **kwargs):
    return aot.report(program_of(text), 8, **kwargs)


def test_an_operand_counts_as_read_unless_it_is_declared_unread():
    assert report(UPDATE)["bytes_per_param"] == (2 + 2 + 4) + (2 + 4)
    declared = report(UPDATE, unread_bytes=2 * 8)
    assert declared["bytes_per_param"] == (2 + 4) + (2 + 4)
    assert declared["mosaic_bytes_read"] == declared["bytes_read"] == 6 * 8
    assert declared["kernels"] == 1


def test_unread_bytes_are_limited_to_operands_of_our_kernels():
    with pytest.raises(ValueError, match="Mosaic kernels have operands of 64 bytes; 65 of these cannot be unread"):
        report(UPDATE, unread_bytes=65)
    with pytest.raises(ValueError, match="operands of 0 bytes"):
        report(UPDATE.replace("mosaic_gpu_v2", "another"), unread_bytes=16)


def test_bytes_between_a_collective_and_our_kernel_are_reported():
    mean = report(MEAN)
    assert mean["between_bytes"] == 8 * (2 + 2)
    assert mean["bytes_per_param"] == (2 + 2 + 4) + (2 + 4) + (2 + 2)
    assert mean["collectives"] == {"all-reduce": [16]}
    assert report(MEAN.replace("mosaic_gpu_v2", "another"))["between_bytes"] == 0
    assert report(UPDATE)["between_bytes"] == 0


# Two iterations over layers: a weight f32[2,8] is sliced, cast and used, and a slice of f32[2,8] is updated in place
LOOP = """
%take (p: f32[2,8], i: s32[]) -> bf16[8] {
  %p = f32[2,8]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %slice = f32[1,8]{1,0} dynamic-slice(%p, %i, %zero), dynamic_slice_sizes={1,8}
  %flat = f32[8]{0} bitcast(%slice)
  ROOT %half = bf16[8]{0} convert(%flat)
}

%put (q: f32[2,8], j: s32[], x: bf16[8]) -> f32[2,8] {
  %q = f32[2,8]{1,0} parameter(0)
  %j = s32[] parameter(1)
  %x = bf16[8]{0} parameter(2)
  %wide = f32[8]{0} convert(%x)
  %row = f32[1,8]{1,0} bitcast(%wide)
  %zero.1 = s32[] constant(0)
  ROOT %new = f32[2,8]{1,0} dynamic-update-slice(%q, %row, %j, %zero.1)
}

%body (t: (s32[], f32[2,8], f32[2,8])) -> (s32[], f32[2,8], f32[2,8]) {
  %t = (s32[], f32[2,8]{1,0}, f32[2,8]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%t), index=0
  %w = f32[2,8]{1,0} get-tuple-element(%t), index=1
  %out = f32[2,8]{1,0} get-tuple-element(%t), index=2
  %cast = bf16[8]{0} fusion(%w, %n), kind=kLoop, calls=%take
  %next = f32[2,8]{1,0} fusion(%out, %n, %cast), kind=kLoop, calls=%put
  ROOT %again = (s32[], f32[2,8]{1,0}, f32[2,8]{1,0}) tuple(%n, %w, %next)
}

ENTRY %main (n0: s32[], w0: f32[2,8], out0: f32[2,8]) -> (s32[], f32[2,8], f32[2,8]) {
  %n0 = s32[] parameter(0)
  %w0 = f32[2,8]{1,0} parameter(1)
  %out0 = f32[2,8]{1,0} parameter(2)
  %start = (s32[], f32[2,8]{1,0}, f32[2,8]{1,0}) tuple(%n0, %w0, %out0)
  ROOT %loop = (s32[], f32[2,8]{1,0}, f32[2,8]{1,0}) while(%start), body=%body, backend_config={"known_trip_count":{"n":"2"}}
}
"""  # noqa: E501


def test_a_loop_counts_once_or_for_all_iterations():
    once, all_turns = report(LOOP), report(LOOP, every_turn=True)
    assert once["kernels"] == 2 and all_turns["kernels"] == 4
    assert all_turns["bytes_read"] == 2 * ((8 * 4 + 4) + (4 + 8 * 2))  # a slice and its index; an index and the update
    assert all_turns["bytes_written"] == 2 * (8 * 2 + 8 * 4)  # the cast; the slice that is updated
    assert once["bytes_written"] == 8 * 2 + 2 * 8 * 4


def test_an_asynchronous_kernel_counts_its_output_once():
    beside = """
ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %begun = ((f32[8]{0}), f32[8]{0}, u32[]) fusion-start(%a), kind=kLoop, calls=%f
  ROOT %done = f32[8]{0} fusion-done(%begun), kind=kLoop, calls=%f
}
"""
    counts = report(beside)
    assert (counts["kernels"], counts["bytes_read"], counts["bytes_written"]) == (1, 32, 32)


def test_casts_of_weights_are_found_in_loops_and_fusions():
    compiled = program_of(LOOP)
    assert h100_autocast.cast_elements(compiled, {1}) == 2 * 8  # each of its 16 elements once
    assert h100_autocast.cast_elements(compiled, {2}) == 0  # written in float32: not cast
    twice = LOOP.replace("%next = ", "%cast.1 = bf16[8]{0} fusion(%w, %n), kind=kLoop, calls=%take\n  %next = ")
    compiled = program_of(twice)
    assert h100_autocast.cast_elements(compiled, {1}) == 2 * 2 * 8


TWO_VERSIONS = """HloModule m

%rounded (p: f32[4,8]) -> bf16[4,8] {
  %p = f32[4,8]{1,0} parameter(0)
  %c = bf16[4,8]{1,0} convert(%p)
  ROOT %add.1 = bf16[4,8]{1,0} add(%c, %c)
}

ENTRY %main (x: f32[4,8]) -> (bf16[4,8], f32[4,8]) {
  %x = f32[4,8]{1,0} parameter(0)
  %add.2 = f32[4,8]{1,0} add(%x, %x)
  %f = bf16[4,8]{1,0} fusion(%x), kind=kLoop, calls=%rounded
  ROOT %t = (bf16[4,8]{1,0}, f32[4,8]{1,0}) tuple(%f, %add.2)
}
"""


def test_two_versions_of_the_logits_are_found():
    compiled = program_of(TWO_VERSIONS)
    assert h100_autocast.sums_of_shape(compiled, (4, 8)) == ["bf16", "f32"]
    assert h100_autocast.sums_of_shape(compiled, (8, 4)) == []
    one, two = ({"dtype": "bf16", "computed_in": d} for d in (["bf16"], ["bf16", "f32"]))
    assert h100_autocast.missed([], [one, two]) == ["logits, bf16: computed in bf16, f32"]


def test_autocast_misses_its_target_only_if_it_costs_more_than_by_hand():
    row = {"model": "m", "dtype": "bf16", "bytes_read": 10, "bytes_written": 5, "weights_cast": 1.0, "kernels": 7}
    hand, ours = row | {"program": "by hand"}, row | {"program": "jaxmp.autocast", "bytes_read": 9, "bytes_written": 6}
    assert h100_autocast.missed([hand, ours]) == []
    worse = ours | {"bytes_written": 7, "kernels": 8}
    assert h100_autocast.missed([hand, worse]) == ["m, bf16: kernels 8, by hand 7", "m, bf16: bytes 16, by hand 15"]


# --- whole steps ------------------------------------------------------------------------------------------------------

TINY = {kind: steps.Stack(kind, 256, 1, sequences=1, length=16) for kind in ("GPT", "Llama")}


@pytest.mark.thorough(0)
@pytest.mark.parametrize("step", steps.steps(), ids=lambda step: step.row.replace(", ", "-").replace(" ", "_"))
def test_every_step_keeps_its_state_as_it_is_and_multiplies_in_16_bits(step):
    """All matmuls are in 16 bits, in fp8 all but attention's: here XLA's, which multiplies some float32 gradients."""
    step = step._replace(stack=TINY[step.stack.kind], flash=False)
    program = steps.program(step)
    state = jax.eval_shape(program.init)
    jaxpr, (after, loss) = jax.make_jaxpr(program.run, return_shape=True)(state, steps.example(step))
    assert loss.shape == () and loss.dtype == jnp.float32
    assert jax.tree.map(lambda x: (x.shape, x.dtype), after) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    dtypes = matmuls_in(jaxpr)
    assert dtypes and "float32" not in dtypes, dtypes


def test_rows_have_names_of_their_own_and_the_first_are_those_to_compare_with():
    names = [step.row for step in steps.steps()]
    assert len(names) == len(set(names)) == 26
    assert names[:3] == ["GPT, linen, bf16 by hand", "GPT, linen, bf16", "GPT, linen, fp8 delayed"]


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
    compiled = program_of(PROGRAM)
    counts = h100_steps.counts(compiled)
    assert (counts["kernels"], counts["gemms"], counts["fp8_gemms"]) == (3, 2, 1)
    monkeypatch.setattr(h100_steps, "MEMORY", 1e3)  # so slow that bytes decide
    slow = h100_steps.counts(compiled)
    moved = (64 * 32 + 32 * 16 + 64 * 16) * 2 + (64 * 32 + 16 * 32 + 64 * 16 * 2)
    np.testing.assert_allclose(slow["gemm_ms"], moved, rtol=1e-6)
    np.testing.assert_allclose(slow["rest_ms"], 2 * 4 * 1024, rtol=1e-6)
    np.testing.assert_allclose(slow["ms"], slow["gemm_ms"] + slow["rest_ms"] + slow["launch_ms"], rtol=1e-6)
    monkeypatch.setattr(h100_steps, "IN_16_BITS", 1.0)  # multiplications decide
    monkeypatch.setattr(h100_steps, "IN_FP8", 2.0)
    np.testing.assert_allclose(h100_steps.counts(compiled)["gemm_ms"], 1e3 * 2 * 64 * 32 * 16 * 1.5, rtol=1e-6)
    assert counts["largest"] == [{"kernel": "c", "layer": "layer_0/norm_1, backward", "mib": 0.0}]


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


def step_row(precision, ms, temp_mib=100.0, remat=False):
    step = {"row": precision, "stack": "GPT", "framework": "linen", "remat": remat, "precision": precision}
    return step | {"ms": ms, "temp_mib": temp_mib}


def test_steps_are_judged_beside_by_hand_and_bf16():
    hand, bf16, fp8 = step_row(steps.BY_HAND, 10.0), step_row("bf16", 10.1), step_row("fp8 delayed", 7.5)
    assert h100_steps.missed([hand, bf16, fp8]) == h100_steps.missed([fp8]) == []
    assert h100_steps.missed([hand, bf16 | {"ms": 10.5}, step_row("fp8 delayed", 8.0, 105.0)]) == [
        "bf16: 1.050 of by hand, over 1.02",
        "fp8 delayed: 1.25 times as fast as by hand, below 1.32",
    ]
    hand, bf16, fp8 = (
        step_row(name, 9.0, mib, remat=True) for name, mib in ((steps.BY_HAND, 9), ("bf16", 9), ("fp8 delayed", 10))
    )
    assert h100_steps.missed([hand, bf16, fp8]) == ["fp8 delayed: 1.11 of the temp of bf16, over 1"]

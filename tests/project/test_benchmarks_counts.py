"""`benchmarks/lib/aot.py` counts the bytes of programs: here programs written by hand, with eight numbers each."""

from types import SimpleNamespace

import pytest

from benchmarks.h100 import autocast as h100_autocast
from benchmarks.lib import aot

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


def report(text, **kwargs):
    memory = SimpleNamespace(temp_size_in_bytes=0, alias_size_in_bytes=0)
    return aot.report(SimpleNamespace(as_text=lambda: text, memory_analysis=lambda: memory), 8, **kwargs)


def test_an_operand_counts_as_read_unless_it_is_declared_unread():
    assert report(UPDATE)["bytes_per_param"] == (2 + 2 + 4) + (2 + 4)
    told = report(UPDATE, unread_bytes=2 * 8)
    assert told["bytes_per_param"] == (2 + 4) + (2 + 4)
    assert told["mosaic_bytes_read"] == told["bytes_read"] == 6 * 8
    assert told["kernels"] == 1


def test_unread_bytes_are_limited_to_operands_of_our_kernels():
    with pytest.raises(ValueError, match="Mosaic kernels have operands of 64 bytes; 65 of these cannot be unread"):
        report(UPDATE, unread_bytes=65)
    with pytest.raises(ValueError, match="operands of 0 bytes"):
        report(UPDATE.replace("mosaic_gpu_v2", "another"), unread_bytes=16)


def test_bytes_between_a_collective_and_our_kernel_are_reported():
    found = report(MEAN)
    assert found["between_bytes"] == 8 * (2 + 2)
    assert found["bytes_per_param"] == (2 + 2 + 4) + (2 + 4) + (2 + 2)
    assert found["collectives"] == {"all-reduce": [16]}
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
    found = report(beside)
    assert (found["kernels"], found["bytes_read"], found["bytes_written"]) == (1, 32, 32)


def test_casts_of_weights_are_found_in_loops_and_fusions():
    compiled = SimpleNamespace(as_text=lambda: LOOP)
    assert h100_autocast.cast_elements(compiled, {1}) == 2 * 8  # each of its 16 elements once
    assert h100_autocast.cast_elements(compiled, {2}) == 0  # written in float32: not cast
    twice = LOOP.replace("%next = ", "%cast.1 = bf16[8]{0} fusion(%w, %n), kind=kLoop, calls=%take\n  %next = ")
    compiled = SimpleNamespace(as_text=lambda: twice)
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
    compiled = SimpleNamespace(as_text=lambda: TWO_VERSIONS)
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

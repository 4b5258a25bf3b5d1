"""`benchmarks/h100_aot.py` counts what a program moves: here programs written by hand, of eight numbers each."""

import pathlib
from types import SimpleNamespace

import pytest

BENCHMARKS = pathlib.Path(__file__).parents[1] / "benchmarks"

# A kernel that reads a gradient and a master, and writes the master and, unread, the param where they stand
UPDATE = """
ENTRY %main (grad: f16[8], param: f16[8], master: f32[8]) -> (f16[8], f32[8]) {
  %grad = f16[8]{0} parameter(0)
  %param = f16[8]{0} parameter(1)
  %master = f32[8]{0} parameter(2)
  ROOT %run = (f16[8]{0}, f32[8]{0}) custom-call(%grad, %param, %master), custom_call_target="mosaic_gpu_v2"
}
"""

# The same behind a mean over two devices
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


@pytest.fixture
def report(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from h100_aot import report

    def of(text, **kwargs):
        memory = SimpleNamespace(temp_size_in_bytes=0, alias_size_in_bytes=0)
        return report(SimpleNamespace(as_text=lambda: text, memory_analysis=lambda: memory), 8, **kwargs)

    return of


def test_an_operand_counts_as_read_unless_it_is_said_not_to_be(report):
    assert report(UPDATE)["bytes_per_param"] == (2 + 2 + 4) + (2 + 4)
    told = report(UPDATE, unread_bytes=2 * 8)
    assert told["bytes_per_param"] == (2 + 4) + (2 + 4)
    assert told["mosaic_bytes_read"] == told["bytes_read"] == 6 * 8
    assert told["kernels"] == 1


def test_no_more_is_unread_than_kernels_of_ours_are_given(report):
    with pytest.raises(ValueError, match="Mosaic kernels have operands of 64 bytes; 65 of these cannot be unread"):
        report(UPDATE, unread_bytes=65)
    with pytest.raises(ValueError, match="operands of 0 bytes"):
        report(UPDATE.replace("mosaic_gpu_v2", "another"), unread_bytes=16)


def test_what_lies_between_a_collective_and_a_kernel_of_ours_is_named(report):
    found = report(MEAN)
    assert found["between_bytes"] == 8 * (2 + 2)
    assert found["bytes_per_param"] == (2 + 2 + 4) + (2 + 4) + (2 + 2)
    assert found["collectives"] == {"all-reduce": [16]}
    assert report(MEAN.replace("mosaic_gpu_v2", "another"))["between_bytes"] == 0
    assert report(UPDATE)["between_bytes"] == 0

"""The sections of the GPU run, in their order: what must be known first stands first.

Only names and limits stand here, nothing is imported: the driver works where jax does not.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

WHOLE = 480.0  # seconds for a whole run
NO_COMMAND_BUFFERS = MappingProxyType({"XLA_FLAGS": "--xla_gpu_enable_command_buffer="})
ONE_BUFFER_EACH = MappingProxyType({"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"})


class Section(NamedTuple):
    """One section: a process of its own.

    Attributes:
      runs: "module:function"; the function gets a `benchmarks.lib.timing.Bench`.
      about: what it measures, for the summary.
      limit: seconds for the section.
      item: seconds for one item of it: a test, or a program that is compiled, warmed up and timed.
      environment: variables that its process gets, besides the driver's; XLA_FLAGS are added to those that are set.
    """

    runs: str
    about: str
    limit: float
    item: float = 60.0
    environment: Mapping[str, str] = MappingProxyType({})


MACHINE = Section("benchmarks.gpu.machine:machine", "what this machine has", 60.0, 60.0)
SECTIONS = {
    "correctness": Section("benchmarks.gpu.correctness:correctness", "each kernel against NumPy", 110.0, 25.0),
    "copy": Section("benchmarks.gpu.kernels:copy", "the bandwidth of a large copy", 25.0, 25.0),
    "casts": Section("benchmarks.gpu.kernels:casts", "casts with transpose and amax beside XLA", 45.0, 30.0),
    "tree": Section("benchmarks.gpu.kernels:tree", "kernels over all leaves beside XLA and torch", 110.0),
    "optimizer": Section("benchmarks.gpu.optimizer:optimizer", "the optimizer's side of a step", 90.0),
    "dense": Section("benchmarks.gpu.models:dense", "one Dense in fp8 beside bf16", 40.0, 30.0),
    "block": Section("benchmarks.gpu.models:block", "a transformer block in fp8 beside bf16", 60.0),
    "offload": Section("benchmarks.gpu.offload:offload", "state in host memory", 70.0),
    "llama": Section("benchmarks.gpu.models:llama", "a whole step of a Llama layer", 100.0),
    "repeats": Section("benchmarks.gpu.soundness:repeats", "20 launches of each kernel are bit-equal", 60.0, 30.0),
    "scan": Section("benchmarks.gpu.soundness:scan", "each kernel in a scan of 4, beside 4 calls", 60.0),
    "remat": Section("benchmarks.gpu.soundness:remat", "a step under remat, beside one without", 45.0, 40.0),
    "large_leaf": Section("benchmarks.gpu.soundness:large_leaf", "a leaf of more than 2^29 elements", 60.0),
    "skipped": Section("benchmarks.gpu.soundness:skipped", "a step that is not taken touches nothing", 40.0, 30.0),
    "leaves": Section("benchmarks.gpu.kernels:leaves", "37 equal leaves beside one of as many bytes", 40.0, 30.0),
    "command_buffers": Section("benchmarks.gpu.optimizer:launches", "steps of many launches", 60.0),
    "no_command_buffers": Section(
        "benchmarks.gpu.optimizer:launches", "the same without command buffers", 60.0, environment=NO_COMMAND_BUFFERS
    ),
    "sanitizer": Section(
        "benchmarks.gpu.sanitizer:sanitizer", "compute-sanitizer over each kernel", 90.0, 80.0, ONE_BUFFER_EACH
    ),
    "crossover": Section("benchmarks.gpu.models:crossover", "the width from which fp8 is faster", 60.0),
    "example": Section("benchmarks.gpu.models:example", "a step of examples/train.py", 60.0),
}

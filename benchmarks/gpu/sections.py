"""The sections of the GPU run, in their order: what a reader asks first stands first."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

WHOLE = 480.0  # seconds for a whole run
ONE_BUFFER_EACH = MappingProxyType({"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"})


class Section(NamedTuple):
    """One section: a process of its own.

    Attributes:
      runs: "module:function"; the function gets a `benchmarks.lib.timing.Bench`. The driver imports no module: it works
        where jax does not.
      about: what it measures, for the summary.
      limit: seconds for the section.
      item: seconds for one item of it: a test, or a program that is compiled, warmed up and timed.
      alone: whether each item gets a process of its own, because what others leave in memory would count.
      environment: variables that its process gets, besides the driver's.
    """

    runs: str
    about: str
    limit: float
    item: float = 60.0
    environment: Mapping[str, str] = MappingProxyType({})
    alone: bool = False


MACHINE = Section("benchmarks.gpu.machine:machine", "what this machine has", 60.0, 60.0)
SECTIONS = {
    # Is it right?
    "right": Section("benchmarks.gpu.right:right", "a Dense and a test of each kernel, against NumPy", 20.0, 20.0),
    # How much faster are the GEMMs of fp8, and a whole step?
    "dense": Section("benchmarks.gpu.models:dense", "a Dense and the 12 GEMMs of a layer, bf16 and fp8", 100.0, 30.0),
    "gpt": Section("benchmarks.gpu.models:gpt", "a whole step of GPT layers, bf16 and fp8", 80.0, 70.0),
    "llama": Section("benchmarks.gpu.models:llama", "a whole step of a Llama layer, bf16 and fp8", 80.0, 70.0),
    # What do the optimizer and the casts cost?
    "optimizer": Section("benchmarks.gpu.optimizer:optimizer", "the optimizer's side of a step", 90.0),
    "casts": Section("benchmarks.gpu.kernels:casts", "casts in one pass beside a cast and XLA's transpose", 75.0, 30.0),
    # The rest
    "copy": Section("benchmarks.gpu.kernels:copy", "the bandwidth of a large copy", 20.0, 20.0),
    "correctness": Section("benchmarks.gpu.correctness:correctness", "each kernel against NumPy", 110.0, 25.0),
    "policies": Section("benchmarks.gpu.models:policies", "the whole steps in other recipes, and in fp16", 200.0, 70.0),
    "crossover": Section("benchmarks.gpu.models:crossover", "the width of a layer from which fp8 is faster", 90.0),
    "offload": Section("benchmarks.gpu.offload:offload", "state in host memory", 140.0, alone=True),
    "repeats": Section("benchmarks.gpu.soundness:repeats", "20 launches of each kernel are bit-equal", 60.0, 30.0),
    "scan": Section("benchmarks.gpu.soundness:scan", "each kernel in a scan of 4, beside 4 calls", 60.0),
    "large_leaf": Section("benchmarks.gpu.soundness:large_leaf", "a leaf of more than 2^29 elements", 60.0),
    "skipped": Section("benchmarks.gpu.soundness:skipped", "a step that is not taken touches nothing", 40.0, 30.0),
    "sanitizer": Section(
        "benchmarks.gpu.sanitizer:sanitizer", "compute-sanitizer over each kernel", 180.0, 85.0, ONE_BUFFER_EACH, True
    ),
    "sums": Section("benchmarks.gpu.sums:sums", "what autocast adds up, beside float64", 120.0, 30.0),
}

# --- names of rows that the report looks for --------------------------------------------------------------------------

ROWS = 8192  # of the Dense layers: tokens
# Inputs and outputs of a layer's four matmuls, at width 4096 with an MLP of 16384, the one Dense first. Forward and
# backward these are the 12 GEMMs that TransformerEngine times.
SIDES = ((4096, 4096), (4096, 12288), (4096, 16384), (16384, 4096))
DENSE = "Dense {}x{}x{}, forward and backward"
STACKS = {"GPT": (2, 2048), "Llama": (1, 4096)}  # layers and width: the steps that `h100 steps` counts
STEP = "training step, {}, width {}, layers: {}"
STEPS = {kind: STEP.format(kind, width, layers) for kind, (layers, width) in STACKS.items()}
WIDTHS = (512, 1024, 2048)  # of one Llama layer, below that of STACKS: where fp8 begins to be faster
OPTIMIZER = "optimizer step, GPT-2 small"
CAST_WAYS = "casts of a Dense {}x{}x{}, forward and backward"
CASTS = "cast_transpose_amax, {0}x{0} {1}"

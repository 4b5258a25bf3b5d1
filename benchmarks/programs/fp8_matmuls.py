"""The fp8 matmuls in a program that was compiled for H100."""

import re
from typing import Any

import jax

from benchmarks.lib import aot

GEMM, FP8_GEMM = "__cublas$lt$matmul", "__cublas$lt$matmul$f8"
# Nothing is autotuned without a device: XLA would choose an untuned Triton kernel instead of cuBLASLt.
OPTIONS = {"xla_gpu_enable_triton_gemm": False}


def everywhere(path: str, layer: Any) -> bool:
    """For `filter=`: by default the first and the last layer stay as they are, and a single layer is both."""
    del path, layer
    return True


def gemms(compiled: jax.stages.Compiled) -> list[dict[str, Any]]:
    """Each call of cuBLASLt: its stage, the dtypes of its operands and result, how it accumulates."""
    calls, types = [], {}
    for name, type_text, op, operands, attributes in aot.parse(aot.computations(compiled)["ENTRY"]):
        types[name] = type_text
        target = re.search(r'custom_call_target="([^"]+)"', attributes)
        if op == "custom-call" and target and target.group(1).startswith(GEMM):
            algorithm = re.search(r'"algorithm":"(\w+)"', attributes)
            stage = re.search(r"jaxmp\.fp8_(\w+)", attributes)
            calls.append(
                {
                    "stage": stage.group(1) if stage else "",
                    "call": target.group(1),
                    "operands": [_dtype(types[operand]) for operand in operands],
                    "result": _dtype(type_text),
                    "algorithm": algorithm.group(1) if algorithm else "",
                }
            )
    return calls


def written_in_fp8(compiled: jax.stages.Compiled) -> int:
    """The number of fp8 tensors, scalars excluded, that kernels write: roundings that XLA kept in the program."""
    runs = aot.parse(aot.computations(compiled)["ENTRY"])
    return sum(len(re.findall(r"f8e[45]m\w+\[\d", type_text)) for _, type_text, op, _, _ in runs if op == "fusion")


def _dtype(type_text: str) -> str:
    return type_text.lstrip("(").split("[")[0]

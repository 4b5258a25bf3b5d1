"""Matmuls in fp8, as programs for H100 that hold them are compiled and read."""

import re
from typing import Any

import jax

from benchmarks.lib import aot

GEMM, FP8_GEMM = "__cublas$lt$matmul", "__cublas$lt$matmul$f8"
# Without a device nothing is autotuned, and the default would be an untuned Triton kernel in the place of cuBLASLt.
OPTIONS = {"xla_gpu_enable_triton_gemm": False}


def everywhere(path: str, layer: Any) -> bool:
    """For `filter=`: one layer is the first and the last at once, and those stay as they are by default."""
    del path, layer
    return True


def gemms(compiled: jax.stages.Compiled) -> list[dict[str, Any]]:
    """Each call of cuBLASLt: its stage, the dtypes of operands and result, how it sums, how many operands it has."""
    found, types = [], {}
    for name, type_text, op, operands, attributes in aot.parse(aot.computations(compiled)["ENTRY"]):
        types[name] = type_text
        target = re.search(r'custom_call_target="([^"]+)"', attributes)
        if op == "custom-call" and target and target.group(1).startswith(GEMM):
            algorithm = re.search(r'"algorithm":"(\w+)"', attributes)
            stage = re.search(r"jaxmp\.fp8_(\w+)", attributes)
            found.append(
                {
                    "stage": stage.group(1) if stage else "",
                    "call": target.group(1),
                    "operands": [_dtype(types[operand]) for operand in operands],
                    "result": _dtype(type_text),
                    "algorithm": algorithm.group(1) if algorithm else "",
                }
            )
    return found


def written_in_fp8(compiled: jax.stages.Compiled) -> int:
    """How many fp8 tensors of more than one number the kernels write: roundings that XLA left in the program."""
    runs = aot.parse(aot.computations(compiled)["ENTRY"])
    return sum(len(re.findall(r"f8e[45]m\w+\[\d", type_text)) for _, type_text, op, _, _ in runs if op == "fusion")


def _dtype(type_text: str) -> str:
    return type_text.lstrip("(").split("[")[0]

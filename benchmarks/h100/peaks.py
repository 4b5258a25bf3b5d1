"""Compares the planned peak of 22 models with XLA's for an H100: eleven that the rules were tuned on, eleven others.

The steps of `benchmarks/programs/peaks.py` are compiled from abstract arguments, with params and state donated. XLA's
peak is its arguments, its scratch memory, and outputs that reuse no argument. Nothing is run.

Target: XLA's peak lies in `Plan.peak_range`, for the XLA of today and for that of jax 0.11.2 (`EARLIER`).
"""

import sys
from typing import Any

from benchmarks.lib import aot
from benchmarks.lib.benchmark import Benchmark
from benchmarks.lib.tables import holds, markdown
from benchmarks.lib.versions import H100, versions
from benchmarks.programs import peaks
from benchmarks.programs.memory import Case

# XLA's peaks by jax 0.11.2, before the other models were here: (bf16, float32).
EARLIER = {
    "MLP, 6 x 1024": (527_186_250, 715_859_850),
    "CNN": (346_032_458, 654_656_202),
    "ResNet with BatchNorm": (371_757_514, 684_199_402),
    "U-Net": (762_742_090, 1_290_145_706),
    "BERT, 4 blocks": (1_200_576_682, 1_841_104_570),
    "WaveNet": (1_173_313_130, 2_295_756_714),
    "VGG": (1_004_165_706, 1_407_489_098),
    "ConvNeXt": (500_213_258, 747_345_290),
    "Llama, 4 blocks": (1_014_055_338, 1_311_840_826),
    "LSTM, 2 layers": (454_227_274, None),
    "GPT, scan over 6 blocks": (2_194_841_770, None),
    "GPT, tied": (1_199_728_670, None),
    "GPT, blocks under remat": (492_261_150, None),
    "ViT": (1_747_994_634, None),
    "encoder and decoder": (1_816_895_402, None),
    "mixture of experts": (1_493_295_738, None),
    "LoRA, rank 16": (540_196_762, None),
}


def compiled_bytes(case: Case) -> int:
    """XLA's peak of one step on an H100."""
    print(f"compiling: {case.name}", file=sys.stderr, flush=True)

    def step(*args: Any) -> Any:
        return case.step(*args)

    there = aot.abstract(aot.mesh(), case.arguments())
    memory: Any = aot.compile_for(step, *there, donate_argnums=(0, 1)).memory_analysis()
    unplaced = max(memory.output_size_in_bytes - memory.alias_size_in_bytes, 0)
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes + unplaced


def row(kind: str, case: Case, peak_xla: int) -> dict[str, Any]:
    """The row of one step, whose peak XLA gave."""
    planned = case.plan()
    earlier = EARLIER.get(case.model, (None, None))[case.precision == "fp32"]
    least, most = planned.peak_range
    found = {
        "model": case.model,
        "precision": case.precision,
        "rules": kind,
        "num_params": planned.num_params,
        "stored": planned.stored + planned.batch,
        "peak": planned.peak,
        "peak_range": [least, most],
        "peak_xla": peak_xla,
        "peak_xla_0_11": earlier,
    }
    outside = [peak for peak in (peak_xla, earlier) if peak is not None and not least <= peak <= most]
    return found | {"missed": [f"{planned.peak / peak:.2f} of XLA's" for peak in outside]}


def render(results: dict[str, Any]) -> str:
    """The results as markdown."""
    head = ["model", "precision", "rules", "stored MB", "peak MB", "range MB", "XLA's MB", "ratio", "ratio, jax 0.11.2"]
    cells = [[*head, "in range"]]
    for found in results["rows"]:
        sizes = [f"{found[name] / 1e6:.0f}" for name in ("stored", "peak")]
        sizes += [" to ".join(f"{n / 1e6:.0f}" for n in found["peak_range"]), f"{found['peak_xla'] / 1e6:.0f}"]
        peaks_of = [found["peak_xla"], found["peak_xla_0_11"]]
        ratios = ["" if peak is None else f"{found['peak'] / peak:.2f}" for peak in peaks_of]
        cells.append([found["model"], found["precision"], found["rules"], *sizes, *ratios, holds(found)])
    return markdown(cells)


def measure_all() -> dict[str, Any]:
    """All results."""
    return {
        "device": "Compiled for H100, not run",
        "versions": versions(H100),
        "rows": [row(kind, case, compiled_bytes(case)) for kind, case in peaks.cases()],
    }


BENCHMARK = Benchmark("h100 peaks", "h100_peaks.json", measure_all, render)

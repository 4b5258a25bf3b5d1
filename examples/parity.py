"""Does low precision cost quality? Five seeds of each policy, longer than the example trains.

    make parity            (or: python examples/parity.py; about 15 minutes on two idle cores)

One fp16 run may end above or below one fp32 run by chance. The question is whether the gap is larger than the
difference that another seed makes in fp32 itself. So each seed (of the params and of the batches) trains every policy.
The gap of a policy to its baseline is computed for each seed, and its mean is compared with the baseline's standard
deviation over the seeds:

    |mean over seeds of (held_out(policy) - held_out(baseline))|  <=  std over seeds of held_out(baseline)

The baseline of 16 bits is fp32. The baseline of fp8 is bf16, because fp8 runs everything except its matmuls in bf16.

The stored run, with its command, is benchmarks/results/parity.json. The run that compares small optimizer state with
whole masters and float32 moments is parity_8bit.json beside it (--policies bf16 bf16+8bit).
"""

import dataclasses
import json
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import tyro
from rich.console import Console
from rich.table import Table

import jaxmp
from report import Run, run_with_progress
from train import Config, start_jax, train


@dataclasses.dataclass(frozen=True)
class Parity:
    """The runs, and the file for the result."""

    seeds: int = 5
    steps: int = 1500  # half as many again as in train.py
    policies: tuple[str, ...] = ("fp32", "bf16", "fp16", "fp8", "fp16+fp8")
    json: Path = Path(__file__).parents[1] / "benchmarks" / "results" / "parity.json"


def baseline_of(policy: str, policies: tuple[str, ...]) -> str:
    """The policy to compare with: bf16 for fp8, else the first."""
    return "bf16" if "fp8" in policy and "bf16" in policies else policies[0]


def summarize(runs: dict[int, list[Run]]) -> dict[str, dict[str, Any]]:
    """For each policy the held-out losses by seed, their gaps to the baseline's, and whether the mean gap is noise."""
    held_out = {run.policy: [] for run in next(iter(runs.values()))}
    skipped = {name: 0 for name in held_out}
    for of_seed in runs.values():
        for run in of_seed:
            held_out[run.policy].append(run.final_held_out)
            skipped[run.policy] += sum(run.skipped)
    summary = {}
    for name, losses in held_out.items():
        baseline = baseline_of(name, tuple(held_out))
        deviation = float(np.std(held_out[baseline], ddof=1))
        gaps = np.array(losses) - np.array(held_out[baseline])
        summary[name] = {
            "baseline": baseline,
            "held_out_losses": losses,
            "mean": float(np.mean(losses)),
            "std": float(np.std(losses, ddof=1)),
            "mean_gap": float(np.mean(gaps)),
            "mean_gap_percent": 100 * float(np.mean(gaps)) / float(np.mean(held_out[baseline])),
            "std_of_gaps": float(np.std(gaps, ddof=1)),
            "skipped_steps": skipped[name],
            "within_seed_to_seed_deviation": bool(abs(np.mean(gaps)) <= deviation),
        }
    return summary


def table(summary: dict[str, dict[str, Any]]) -> Table:
    """The summary for a reader."""
    seeds = len(next(iter(summary.values()))["held_out_losses"])
    out = Table(title=f"held-out loss (nats per byte), {seeds} seeds")
    for name in ("policy", "mean", "std over seeds", "against", "mean gap", "gap [%]", "skipped", "gap within std"):
        out.add_column(name, justify="left" if name in ("policy", "against") else "right")
    for name, row in summary.items():
        is_baseline = name == row["baseline"]
        out.add_row(
            name,
            f"{row['mean']:.4f}",
            f"{row['std']:.4f}",
            "" if is_baseline else row["baseline"],
            "" if is_baseline else f"{row['mean_gap']:+.4f}",
            "" if is_baseline else f"{row['mean_gap_percent']:+.2f}",
            str(row["skipped_steps"]),
            "" if is_baseline else "yes" if row["within_seed_to_seed_deviation"] else "NO",
        )
    return out


def main(parity: Parity) -> None:
    """Trains, prints, writes."""
    console = Console(highlight=False)
    cfg = Config(steps=parity.steps)
    start_jax(cfg)
    runs = {}
    for seed in range(parity.seeds):
        seeded = dataclasses.replace(cfg, seed=seed, policies=parity.policies)
        runs[seed] = run_with_progress(train, seeded, console, f"seed {seed} {{}}")
    summary = summarize(runs)
    console.print(table(summary))
    settings = {k: v for k, v in dataclasses.asdict(cfg).items() if isinstance(v, (int, float, str, tuple))}
    parity.json.parent.mkdir(parents=True, exist_ok=True)
    parity.json.write_text(
        json.dumps(
            {
                "command": "python examples/" + shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
                "python": platform.python_version(),
                "packages": {m.__name__: m.__version__ for m in (jax, optax, jaxmp)},
                "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
                "config": settings | {"policies": parity.policies},
                "seeds": parity.seeds,
                "summary": summary,
            },
            indent=2,
        )
        + "\n"
    )
    console.print(f"written to {parity.json.name}")


if __name__ == "__main__":
    main(tyro.cli(Parity, description=__doc__))

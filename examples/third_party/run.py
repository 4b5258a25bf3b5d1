"""Trains each model of models.py in four precisions, and writes the table of README.md.

pip install '.[third-party]'
pip download --no-deps --no-binary flax flax==VERSION -d examples/third_party     flax's examples, of the flax installed
python examples/third_party/run.py                 all of it: minutes on two cores
python examples/third_party/run.py --models haiku --steps 5 --seeds 1 --no-table
"""

import argparse
import collections
import difflib
import importlib.metadata
import json
import math
import platform
import statistics
import tempfile
import warnings
from pathlib import Path
from typing import Any

import jax
import models
import optax
import plain_loop
import ported_loop

import jaxmp

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parents[1] / "benchmarks" / "results" / "third_party.json"
BEGIN, END = "<!-- table: written by run.py -->", "<!-- table: end -->"
PACKAGES = ("jax", "flax", "optax", "transformers", "dm-haiku", "equinox")

# float32 params, as these models have.
POLICIES = {
    "fp32": None,
    "bf16": jaxmp.get_policy("bf16-mixed"),
    "fp16": jaxmp.get_policy("16-mixed"),
    "fp8": jaxmp.get_policy("bf16-mixed"),  # and `in_fp8`
}


def in_fp8(model: models.Model) -> models.Model:
    """The layers hold no scales, so the recipe is one without state, on the matmuls of the loss: one more line."""
    return model._replace(loss=jaxmp.autocast(model.loss, "fp8", recipe=jaxmp.fp8.CurrentScaling()))


def made(name: str, policy: str, seed: int) -> models.Model:
    """A model as a policy trains it."""
    dtype = jax.numpy.float32 if POLICIES[policy] is None else POLICIES[policy].compute_dtype
    model = models.MODELS[name][0](seed, dtype)
    return in_fp8(model) if policy == "fp8" else model


def lines_changed() -> int:
    """How many lines of the loop are new or different."""
    texts = [(HERE / name).read_text().splitlines()[1:] for name in ("plain_loop.py", "ported_loop.py")]
    return sum(line.startswith("+ ") and line != "+ " for line in difflib.ndiff(*texts))


def flops_of_matmuls(closed: Any) -> dict[str, int]:
    """FLOPs of matmuls and convolutions by the narrower dtype of their operands, fp8's emulation left out."""
    found: collections.Counter = collections.Counter()

    def walk(jaxpr: Any, times: int) -> None:
        for eqn in jaxpr.eqns:
            params = dict(eqn.params)
            if eqn.primitive.name in ("dot_general", "conv_general_dilated"):
                lhs, rhs = (v.aval for v in eqn.invars[:2])
                if eqn.primitive.name == "dot_general":
                    summed = math.prod(lhs.shape[i] for i in params["dimension_numbers"][0][0])
                else:
                    summed = rhs.size // rhs.shape[params["dimension_numbers"].rhs_spec[0]]
                narrow = min(lhs.dtype, rhs.dtype, key=lambda d: d.itemsize)
                found[narrow.name] += 2 * times * summed * eqn.outvars[0].aval.size
            if params.get("branches_platforms") is not None:
                params["branches"] = params["branches"][:1]
            for inner in jax.tree.leaves(list(params.values()), is_leaf=lambda x: hasattr(x, "jaxpr")):
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    walk(getattr(inner, "jaxpr", inner), times * params.get("length", 1))

    walk(closed.jaxpr, 1)
    return dict(found)


def share_of_low_precision(name: str, policy: str) -> float:
    """The part of the FLOPs of a step's matmuls in 16 bits, or for fp8 in 8 bits, in percent."""
    model, of_policy = made(name, policy, 0), POLICIES[policy]
    opt_state = jaxmp.mixed_precision(optax.sgd(0.1), of_policy).init(model.params)
    grad_fn = jaxmp.value_and_grad(model.loss, has_aux=True, policy=of_policy)
    batch = next(model.batches(1, 0))
    flops = flops_of_matmuls(jax.make_jaxpr(grad_fn)(model.params, model.state, batch, opt_state=opt_state))
    widest = 1 if policy == "fp8" else 2
    return 100 * sum(n for dtype, n in flops.items() if jax.numpy.dtype(dtype).itemsize <= widest) / sum(flops.values())


def run(name: str, policy: str, seed: int, steps: int) -> dict[str, Any]:
    """One training: the held-out loss in the precision that it was trained in, and the skipped steps."""
    model, of_policy = made(name, policy, seed), POLICIES[policy]
    loop = plain_loop if of_policy is None else ported_loop
    params, state, opt_state = loop.train(model, optax.adamw(3e-3), model.batches(steps, seed), of_policy)
    loss = model.loss if of_policy is None else jaxmp.autocast(model.loss, of_policy)
    held_out = float(jax.jit(loss)(params, state, model.held_out)[0])
    skipped = 0 if of_policy is None else int(jaxmp.get_metrics(opt_state)["skipped_steps"])
    return {"model": name, "policy": policy, "seed": seed, "held_out": held_out, "skipped": skipped}


def table(results: dict[str, Any]) -> str:
    """The table of README.md."""
    lines = [
        "| model | policy | lines changed | matmul FLOPs in it | held-out loss | against fp32 | skipped steps |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(r["model"] for r in results["runs"]):
        losses = collections.defaultdict(dict)
        skipped = collections.Counter()
        for r in results["runs"]:
            if r["model"] == name:
                losses[r["policy"]][r["seed"]] = r["held_out"]
                skipped[r["policy"]] += r["skipped"]
        for policy, found in losses.items():
            shown = f"{statistics.mean(found.values()):.3f}"
            if policy == "fp32":
                lines.append(f"| {name} | fp32 | | | {shown} | | |")
                continue
            gaps = [100 * (found[seed] / losses["fp32"][seed] - 1) for seed in found]
            error = f" ± {statistics.stdev(gaps) / len(gaps) ** 0.5:.2f}" if len(gaps) > 1 else ""
            changed, share = results["lines"][name] + (policy == "fp8"), results["flops"][name][policy]
            lines.append(
                f"| | {policy} | {changed} | {share:.0f} % | {shown} | {statistics.mean(gaps):+.2f}{error} % "
                f"| {skipped[policy]} |"
            )
    versions = ", ".join(f"{package} {version}" for package, version in results["versions"].items())
    return "\n".join([*lines, "", f"{results['steps']} steps, {results['seeds']} seeds, on a CPU; {versions}."])


def write_table(results: dict[str, Any]) -> None:
    page = HERE / "README.md"
    before, rest = page.read_text().split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n\n{table(results)}\n\n{END}{rest.split(END)[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="", help="only those whose name has this in it")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--no-table", action="store_true", help="print the table, and write nothing")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=jaxmp.fp8.FallbackWarning)
    jax.config.update("jax_compilation_cache_dir", tempfile.mkdtemp())  # another seed is the same program
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    chosen = [name for name in models.MODELS if args.models in name]
    runs, flops = [], collections.defaultdict(dict)
    for name in chosen:
        for policy in POLICIES:
            if policy != "fp32":
                flops[name][policy] = share_of_low_precision(name, policy)
            for seed in range(args.seeds):
                runs.append(run(name, policy, seed, args.steps))
                print(runs[-1], flush=True)
    results = {
        "command": "python examples/third_party/run.py",
        "device": "CPU",
        "versions": {
            "python": platform.python_version(),
            **{package: importlib.metadata.version(package) for package in PACKAGES},
        },
        "steps": args.steps,
        "seeds": args.seeds,
        "lines": {name: lines_changed() + models.MODELS[name][1] for name in chosen},
        "flops": flops,
        "runs": runs,
    }
    if args.no_table:
        print(table(results))
        return
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    write_table(results)


if __name__ == "__main__":
    main()

"""Trains each model of models.py in each precision, and writes the table of README.md.

pip install '.[third-party]'
pip download --no-deps --no-binary flax flax==VERSION -d examples/third_party     flax's examples, of the flax installed
python examples/third_party/run.py                 all of it: most of an hour on two cores
python examples/third_party/run.py --models haiku --steps 5 --seeds 1 --no-table

Each result is stored when it is there. A run that was stopped goes on where it was, if the versions are the same.
"""

import argparse
import collections
import difflib
import functools
import itertools
import statistics
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import models
import optax
import plain_loop
import ported_loop
import stored

import jaxmp

HERE = Path(__file__).resolve().parent
RESULTS = stored.RESULTS / "third_party.json"
BEGIN, END = "<!-- table: written by run.py -->", "<!-- table: end -->"
PACKAGES = ("jax", "flax", "optax", "transformers", "dm-haiku", "equinox")
IN_LAYERS, ROUNDED_ONCE = "fp8 in layers", "fp32, rounded once"
STEPS, SEEDS = 200, 2

# float32 params, as these models have. keep_fp32=() says that no layer has to stay in float32.
POLICIES = {
    "fp32": None,
    ROUNDED_ONCE: None,  # its first params are rounded to bfloat16: how far apart two runs in float32 come to lie
    "bf16": jaxmp.get_policy("bf16-mixed", keep_fp32=()),
    "fp16": jaxmp.get_policy("16-mixed", keep_fp32=()),
    "fp8": jaxmp.get_policy("bf16-mixed", keep_fp32=()),  # and `in_fp8`
    IN_LAYERS: jaxmp.get_policy("fp8", keep_fp32=()),
}
RECIPE = jaxmp.fp8.CurrentScaling()

# Why a matmul runs in 16 bits under a policy in fp8, by the rules of fp8. Another reason is a gap.
BY_RULE = {
    "the function computes both operands": "attention",
    "the first operation with weights": "first layer",
    "the last operation with weights": "last layer",
    "it is a convolution": "convolutions",
}


def in_fp8(model: models.Model) -> models.Model:
    """The layers hold no scales, so the recipe is one without state, on the matmuls of the loss: one more line."""
    return model._replace(loss=jaxmp.autocast(model.loss, "fp8", recipe=RECIPE))


@functools.lru_cache(maxsize=1)
def as_it_is(name: str, seed: int) -> models.Model:
    """A model as its package makes it."""
    return models.MODELS[name](seed)


def made(name: str, policy: str, seed: int) -> models.Model:
    """A model as a policy trains it."""
    if policy == IN_LAYERS:
        with jaxmp.autocast(POLICIES[policy]):
            return models.MODELS[name](seed)
    model = as_it_is(name, seed)
    if policy == ROUNDED_ONCE:
        return model._replace(params=jax.tree.map(lambda x: x.astype("bfloat16").astype(x.dtype), model.params))
    return in_fp8(model) if policy == "fp8" else model


def lines_changed() -> int:
    """How many lines of the loop are new or different."""
    texts = [(HERE / name).read_text().splitlines()[1:] for name in ("plain_loop.py", "ported_loop.py")]
    return sum(line.startswith("+ ") and line != "+ " for line in difflib.ndiff(*texts))


def shares_of_flops(name: str, policy: str) -> dict[str, dict[str, float]]:
    """Percent of the FLOPs of a loss's matmuls and convolutions by dtype, and of those that are wider by the reason."""
    model = made(name, IN_LAYERS if policy == IN_LAYERS else "fp32", 0)
    options = {"recipe": RECIPE} if policy == "fp8" else {}
    explained = jaxmp.explain_autocast(
        model.loss, model.params, model.state, next(model.batches(1, 0)), dtype=POLICIES[policy], **options
    )
    dtypes = explained.matmul_flops_by_dtype()
    widest, total = 1 if "fp8" in policy else 2, sum(dtypes.values())
    reasons: collections.Counter = collections.Counter()
    for row in explained.rows:
        is_matmul = row.name in ("dot_general", "ragged_dot_general", "conv_general_dilated")
        if is_matmul and jax.numpy.dtype(row.runs_in).itemsize > widest:
            reasons[row.group.removeprefix("allow, not fp8: ").split(":")[0]] += row.flops
    return {
        "dtypes": {dtype: round(100 * flops / total, 2) for dtype, flops in dtypes.items()},
        "wider": {reason: round(100 * flops / total, 2) for reason, flops in reasons.items()},
    }


def wanted_share(policy: str, shares: dict[str, dict[str, float]]) -> float | None:
    """Percent of the FLOPs in 16 or 8 bits, of those that the rules want there; None: they want none."""
    widest = 1 if "fp8" in policy else 2
    narrow = sum(x for dtype, x in shares["dtypes"].items() if jax.numpy.dtype(dtype).itemsize <= widest)
    missing = sum(x for reason, x in shares["wider"].items() if reason not in BY_RULE)
    return 100 * narrow / (narrow + missing) if narrow + missing else None


def policies_of(name: str, chosen: Iterable[str] = POLICIES) -> list[str]:
    """Scales in layers are linen's: GPT-2, and packages without flax's layers, hold none."""
    return [policy for policy in chosen if policy != IN_LAYERS or name in models.WITH_LINEN_LAYERS]


def run(name: str, policy: str, seed: int, steps: int) -> dict[str, Any]:
    """One training: the held-out loss in the precision that it was trained in, and the skipped steps."""
    model, of_policy = made(name, policy, seed), POLICIES[policy]
    loop = plain_loop if of_policy is None else ported_loop
    tx = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-3, steps // 10, steps))
    params, state, opt_state = loop.train(model, tx, model.batches(steps, seed), of_policy)
    loss = model.loss if of_policy is None else jaxmp.autocast(model.loss, of_policy)
    held_out = float(jax.jit(loss)(params, state, model.held_out)[0])
    skipped = 0 if of_policy is None else int(jaxmp.get_metrics(opt_state)["skipped_steps"])
    return {"model": name, "policy": policy, "seed": seed, "held_out": held_out, "skipped": skipped}


def table(results: dict[str, Any]) -> str:
    """The table of README.md."""
    lines = [
        "| model | policy | matmul FLOPs in it | of those wanted | the rest | held-out loss | against fp32 | skipped |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(r["model"] for r in results["runs"]):
        losses = collections.defaultdict(dict)
        skipped = collections.Counter()
        for r in results["runs"]:
            if r["model"] == name:
                losses[r["policy"]][r["seed"]] = r["held_out"]
                skipped[r["policy"]] += r["skipped"]
        for policy in filter(results["flops"][name].__contains__, POLICIES):
            shares = results["flops"][name][policy]
            cells, found = f"| | {policy} | {shown_shares(policy, shares)} |", losses[policy]
            if policy == "fp32":
                lines.append(f"| {name} | fp32 | | | | {statistics.mean(found.values()):.3f} | | |")
                continue
            if not found:
                lines.append(f"{cells} | | |")
                continue
            gaps = [100 * (found[seed] / losses["fp32"][seed] - 1) for seed in found]
            shown = ", ".join(f"{gap:+.2f} %" for gap in gaps)
            lines.append(f"{cells} {statistics.mean(found.values()):.3f} | {shown} | {skipped[policy]} |")
    return "\n".join([*lines, "", stored.footer(results)])


def shown_shares(policy: str, shares: dict[str, dict[str, float]] | None) -> str:
    """Three cells: the part of the FLOPs in the policy's dtype, of those wanted there, and why the rest is not."""
    if shares is None:
        return " | | "
    widest = 1 if "fp8" in policy else 2
    inside = sum(x for dtype, x in shares["dtypes"].items() if jax.numpy.dtype(dtype).itemsize <= widest)
    if policy == IN_LAYERS:  # the layers say nothing of the rest
        return f"{inside:.1f} % | | "
    wanted = wanted_share(policy, shares)
    of_wanted = "it has none" if wanted is None else f"{wanted:.0f} %"
    rest = ", ".join(f"{BY_RULE.get(why, why)} {x:.1f} %" for why, x in shares["wider"].items())
    return f"{inside:.1f} % | {of_wanted} | {rest}"


def add_rows(results: dict[str, Any], names: Iterable[str], seeds: int) -> Iterable[dict[str, Any]]:
    """Fills `results`; yields after each row, and what tells most comes first: a run may be stopped."""
    done = {(r["model"], r["policy"], r["seed"]) for r in results["runs"]}
    for seed, chosen in itertools.product(range(seeds), (("fp32", "bf16", "fp16", "fp8"), (IN_LAYERS, ROUNDED_ONCE))):
        for name in names:
            flops = results["flops"].setdefault(name, {})
            for policy in policies_of(name, chosen):
                if policy not in flops:
                    flops[policy] = shares_of_flops(name, policy) if POLICIES[policy] else None
                in_vain = flops[policy] is not None and wanted_share(policy, flops[policy]) is None
                if not in_vain and (name, policy, seed) not in done:
                    results["runs"].append(run(name, policy, seed, results["steps"]))
                    yield results["runs"][-1]
            jax.clear_caches()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="", help="only those whose name has this in it")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--no-table", action="store_true", help="print the table, and write nothing")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", category=jaxmp.fp8.FallbackWarning)
    stored.keep_programs()
    results = stored.new_results("python examples/third_party/run.py", PACKAGES, args.steps) | {"flops": {}}
    if not args.no_table:
        results = stored.goes_on(RESULTS, results)
    for row in add_rows(results, [name for name in models.MODELS if args.models in name], args.seeds):
        print(row, flush=True)
        if not args.no_table:
            stored.write(RESULTS, results, BEGIN, END, table(results))
    if args.no_table:
        print(table(results))


if __name__ == "__main__":
    main()

"""Is a gap to float32 noise? Trains each model of families.py with several seeds, and writes a table into README.md.

pip install '.[third-party]' && pip install --no-deps flaxmodels && pip install h5py pillow requests
python examples/third_party/seeds.py                 all of it: an hour on two cores
python examples/third_party/seeds.py --models CLIP --steps 5 --seeds 2 --no-table

Beside the policy stands the model as its author trains it in 16 bits: its own dtype, float32 params, in fp16 with
flax's DynamicScale. A seed chooses the first params and the batches, the same for each way. A run that was stopped
goes on where it was, if the versions are the same.
"""

import argparse
import itertools
import math
import statistics
import warnings
from typing import Any

import families
import jax
import jax.numpy as jnp
import models
import optax
import plain_loop
import stored
from flax.training import dynamic_scale

import jaxmp

RESULTS = stored.RESULTS / "third_party_seeds.json"
BEGIN, END = "<!-- seeds: written by seeds.py -->", "<!-- seeds: end -->"
PACKAGES = ("jax", "flax", "optax", "transformers", "dm-haiku", "flaxmodels")
STEPS, SEEDS = 200, 5
RATES = {"transformers, FlaxCLIPModel": 3e-4}  # at 1e-3 float32, too, often stays where all pictures are alike
DTYPES = {"bf16": "bfloat16", "fp16": "float16"}
WAYS = ("fp32", "bf16 by hand", "bf16", "fp16 by hand", "fp16")


def train_with_dynamic_scale(model: models.Model, tx: Any, batches: Any) -> tuple[Any, Any]:
    """The loop of flax's examples in float16: its scale chooses between the old and the new params."""
    params, state, opt_state, scale = model.params, model.state, tx.init(model.params), dynamic_scale.DynamicScale()

    @jax.jit
    def step(params, state, opt_state, scale, batch):
        grad_fn = scale.value_and_grad(model.loss, has_aux=True)
        scale, is_finite, (_, new_state), grads = grad_fn(params, state, batch)
        updates, new_opt_state = tx.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), new_state, new_opt_state
        kept = jax.tree.map(lambda a, b: jnp.where(is_finite, a, b), new, (params, state, opt_state))
        return *kept, scale

    for batch in batches:
        params, state, opt_state, scale = step(params, state, opt_state, scale, batch)
    return params, state


def train_with_policy(model: models.Model, tx: Any, batches: Any, policy: str) -> tuple[Any, Any]:
    """As README writes it: the model gets the params of the policy, the masters are float32."""
    train_state = jaxmp.linen.TrainState.create(apply_fn=None, params=model.params, tx=tx, policy=policy)

    @jax.jit
    def step(train_state, state, batch):
        grad_fn = jaxmp.value_and_grad(model.loss, has_aux=True)
        (_, new_state), grads = grad_fn(train_state.params, state, batch, opt_state=train_state)
        train_state = train_state.apply_gradients(grads=grads)
        return train_state, jaxmp.keep_if_skipped(train_state.opt_state, new_state, state)

    state = model.state
    for batch in batches:
        train_state, state = step(train_state, state, batch)
    return train_state.params, state


def run(name: str, way: str, seed: int, steps: int) -> dict[str, Any]:
    """One training: the held-out loss in the precision of the training."""
    policy, by_hand = way.split()[0], way.endswith("by hand")
    model = families.FAMILIES[name](seed, DTYPES[policy] if by_hand else "float32")
    tx = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, RATES.get(name, 1e-3), steps // 10, steps))
    batches, loss = model.batches(steps, seed), model.loss
    if way == "fp16 by hand":
        params, state = train_with_dynamic_scale(model, tx, batches)
    elif by_hand or way == "fp32":
        params, state, _ = plain_loop.train(model, tx, batches)
    else:
        params, state = train_with_policy(model, tx, batches, policy)
        loss = jaxmp.autocast(model.loss, policy)
    held_out = float(jax.jit(loss)(params, state, model.held_out)[0])
    return {"model": name, "way": way, "seed": seed, "held_out": held_out}


def mean_and_error(numbers: list[float]) -> str:
    """The mean, and its standard error."""
    if len(numbers) < 2:
        return f"{numbers[0]:+.1f}"
    return f"{statistics.mean(numbers):+.1f} ± {statistics.stdev(numbers) / math.sqrt(len(numbers)):.1f}"


def table(results: dict[str, Any]) -> str:
    """The table of README.md: gaps in percent of the mean loss in float32, paired by seed."""
    lines = [
        "| model | fp32: loss, spread over seeds | bf16 by hand | bf16 | bf16 against by hand | fp16 by hand | fp16 "
        "| fp16 against by hand |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(r["model"] for r in results["runs"]):
        losses = {way: {} for way in WAYS}
        for r in results["runs"]:
            if r["model"] == name:
                losses[r["way"]][r["seed"]] = r["held_out"]
        baseline = list(losses["fp32"].values())
        mean = statistics.mean(baseline)

        def gaps(way: str, to: str, losses: Any = losses, mean: float = mean) -> str:
            seeds = sorted(losses[way].keys() & losses[to].keys())
            return mean_and_error([100 * (losses[way][s] - losses[to][s]) / mean for s in seeds]) if seeds else ""

        spread = 100 * statistics.stdev(baseline) / mean if len(baseline) > 1 else math.nan
        cells = [f"{mean:.3g}, {spread:.1f} %"]
        for policy in DTYPES:
            by_hand = f"{policy} by hand"
            cells += [gaps(by_hand, "fp32"), gaps(policy, "fp32"), gaps(policy, by_hand)]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", stored.footer(results)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="", help="only those whose name has this in it")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--no-table", action="store_true", help="print the table, and write nothing")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*np.float64 is requested.*")
    stored.keep_programs()
    results = stored.new_results("python examples/third_party/seeds.py", PACKAGES, args.steps)
    if not args.no_table:
        results = stored.goes_on(RESULTS, results)
    done = {(r["model"], r["way"], r["seed"]) for r in results["runs"]}
    names = [name for name in families.FAMILIES if args.models in name]
    for name, seed, way in itertools.product(names, range(args.seeds), WAYS):
        if (name, way, seed) not in done:
            results["runs"].append(run(name, way, seed, args.steps))
            print(results["runs"][-1], flush=True)
            if not args.no_table:
                stored.write(RESULTS, results, BEGIN, END, table(results))
        jax.clear_caches()
    print(table(results))


if __name__ == "__main__":
    main()

"""examples/third_party: its table is the stored results, and its models trace in the precision that the table says."""

import contextlib
import importlib.metadata
import io
import json
import math
import sys
import tarfile

import jax
import optax
import pytest

import jaxmp
import matmul_dtypes
from helpers import ROOT

FOLDER = ROOT / "examples" / "third_party"


@pytest.fixture(scope="module")
def run():
    """The script, imported from its folder, whose other modules have names that are too short for the path of all."""
    before = list(sys.path), set(sys.modules)
    sys.path.insert(0, str(FOLDER))
    try:
        import run

        yield run
    finally:
        sys.path[:] = before[0]
        for name in ("run", "flax_examples", "models", "plain_loop", "ported_loop", "seeds", "families", "stored"):
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def results():
    return json.loads((ROOT / "benchmarks" / "results" / "third_party.json").read_text())


def test_both_tables_are_the_stored_results_which_are_whole(run, results):
    import seeds

    page = (FOLDER / "README.md").read_text()
    assert f"{run.BEGIN}\n\n{run.table(results)}\n\n{run.END}" in page
    rows = {(r["model"], r["policy"], r["seed"]) for r in results["runs"]}
    assert len(rows) == len(results["runs"]) and results["steps"] == run.STEPS
    assert set(results["flops"]) == set(run.models.MODELS)
    for model, by_policy in results["flops"].items():
        assert set(by_policy) == set(run.policies_of(model))
        for policy, shares in by_policy.items():
            wanted = None if shares is None else run.wanted_share(policy, shares)
            assert ((model, policy, 0) in rows) == (shares is None or wanted is not None)
            if policy != run.IN_LAYERS:  # the layers say nothing of the rest
                assert wanted is None or wanted >= 95, (model, policy, shares)

    of_seeds = json.loads(seeds.RESULTS.read_text())
    assert f"{seeds.BEGIN}\n\n{seeds.table(of_seeds)}\n\n{seeds.END}" in page
    rows = [(r["model"], r["way"], r["seed"]) for r in of_seeds["runs"]]
    assert len(rows) == len(set(rows)) == len(seeds.families.FAMILIES) * len(seeds.WAYS) * seeds.SEEDS
    assert of_seeds["steps"] == seeds.STEPS and {r["model"] for r in of_seeds["runs"]} == set(seeds.families.FAMILIES)
    assert run.lines_changed() == 4 and "four lines differ" in " ".join(page.split())


def test_a_gap_is_paired_by_seed(run):
    import seeds

    losses = {"fp32": (2.0, 4.0), "bf16 by hand": (2.2, 4.2), "bf16": (2.1, 4.5)}
    losses |= {"fp16 by hand": (2.0, 4.0), "fp16": (2, 4)}
    pairs = [(way, seed, loss) for way, pair in losses.items() for seed, loss in enumerate(pair)]
    runs = [{"model": "a", "way": way, "seed": seed, "held_out": loss} for way, seed, loss in pairs]
    table = seeds.table({"runs": runs, "steps": 3, "versions": {"jax": "1"}})
    assert "| a | 3, 47.1 % | +6.7 ± 0.0 | +10.0 ± 6.7 | +3.3 ± 6.7 | +0.0 ± 0.0 | +0.0 ± 0.0 | +0.0 ± 0.0 |" in table
    assert table.endswith("3 steps, 2 seeds, on a CPU; jax 1.")


def test_a_run_goes_on_where_it_was(run, monkeypatch):
    ran = []
    monkeypatch.setattr(jax, "clear_caches", lambda: None)  # the other tests need their programs
    monkeypatch.setattr(run, "shares_of_flops", lambda name, policy: {"dtypes": {"float8_e4m3fn": 100.0}, "wider": {}})

    def trained(model, policy, seed, steps):
        ran.append((model, policy, seed))
        return {"model": model, "policy": policy, "seed": seed}

    monkeypatch.setattr(run, "run", trained)
    names = list(run.models.MODELS)[:2]
    results = {"steps": 3, "flops": {}, "runs": []}
    rows = run.add_rows(results, names, seeds=2)
    first = [next(rows) for _ in range(5)]  # and then it is stopped
    assert results["runs"] == first and [row["policy"] for row in first] == ["fp32", "bf16", "fp16", "fp8", "fp32"]
    again = list(run.add_rows(results, names, seeds=2))
    assert len(ran) == len(set(ran)) == 5 + len(again)
    assert set(ran) == {(name, policy, seed) for name in names for policy in run.policies_of(name) for seed in (0, 1)}


@pytest.mark.thorough(1)
@pytest.mark.parametrize("policy", ["fp8", "bf16"])
@pytest.mark.parametrize(
    "package", ["equinox", "haiku", "transformers, FlaxGPT2", "flax's examples, wmt", "flax's examples, gemma"]
)
def test_matmuls_run_in_what_the_table_says(run, results, package, policy):
    """Forward by `explain_autocast`, and forward and backward by a count of the traced step's equations."""
    if package.startswith("flax"):
        try:
            run.models.flax_examples.archive()
        except FileNotFoundError as missing:
            pytest.skip(str(missing))
    else:
        pytest.importorskip(package.partition(",")[0], reason="installed by the extra third-party")
    name = next(name for name in run.models.MODELS if name.startswith(package))
    if package.startswith("transformers"):
        pytest.importorskip(
            "transformers.models.gpt2.modeling_flax_gpt2", reason="this transformers has no Flax models"
        )
    is_in_vain = (package, policy) == ("haiku", "fp8")  # its convolutions have more than one pixel
    warns = pytest.warns(UserWarning, match="no-layer-in-fp8") if is_in_vain else contextlib.nullcontext()
    with jax.numpy_rank_promotion("allow"), warns:
        shares = run.shares_of_flops(name, policy)
        flops = flops_of_gradients(run, name, policy)
    assert shares == results["flops"][name][policy]
    narrow = "float8" if policy == "fp8" else "bfloat16"
    forward = sum(x for dtype, x in shares["dtypes"].items() if dtype.startswith(narrow))
    both = 100 * sum(n for dtype, n in flops.items() if dtype.startswith(narrow)) / sum(flops.values())
    assert abs(forward - both) < 2  # no gradient of a batch is taken


def flops_of_gradients(run, name, policy):
    model, of_policy = run.made(name, policy, 0), run.POLICIES[policy]
    opt_state = jaxmp.mixed_precision(optax.sgd(0.1), of_policy).init(model.params)
    grad_fn = jaxmp.value_and_grad(model.loss, has_aux=True, policy=of_policy)

    def step(params, state, batch, opt_state):
        return grad_fn(params, state, batch, opt_state=opt_state)

    return matmul_dtypes.matmul_flops(step, model.params, model.state, next(model.batches(1, 0)), opt_state)


@pytest.mark.thorough(0)
@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_a_model_trains(run, policy):
    pytest.importorskip("equinox", reason="installed by the extra third-party")
    (name,) = [name for name in run.models.MODELS if name.startswith("equinox")]
    with jax.numpy_rank_promotion("allow"):
        row = run.run(name, policy, seed=0, steps=2)
    assert 0 < row["held_out"] < 7 and row["skipped"] == 0


def test_a_file_of_flax_is_executed_as_it_is(run, tmp_path, monkeypatch):
    """It imports the files beside it, mocks for its data, and whatever is installed, which stays imported."""
    flax_examples = sys.modules["flax_examples"]
    version = importlib.metadata.version("flax")
    monkeypatch.setattr(flax_examples, "HERE", tmp_path)
    with pytest.raises(FileNotFoundError, match=f"pip download --no-deps --no-binary flax flax=={version}"):
        flax_examples.load("mnist/train.py")
    sources = {
        "train.py": b"import tensorflow as tf\nimport colorsys\nimport models\n\ndef data() -> tf.data.Dataset: ...\n",
        "models.py": b"import math\n\nAREA = math.pi\n",
    }
    with tarfile.open(tmp_path / f"flax-{version}.tar.gz", "w:gz") as files:
        for name, source in sources.items():
            entry = tarfile.TarInfo(f"flax-{version}/examples/mnist/{name}")
            entry.size = len(source)
            files.addfile(entry, io.BytesIO(source))
    names = ("tensorflow", "train", "models")  # another test may have imported a train.py
    before = [sys.modules.get(name) for name in names]
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    assert flax_examples.load("mnist/train.py").models.AREA == math.pi
    assert all(sys.modules.get(name) is x for name, x in zip(names, before, strict=True))  # the mock is gone
    assert sys.modules["models"] is run.models
    assert "colorsys" in sys.modules

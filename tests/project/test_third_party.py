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
        for name in ("run", "flax_examples", "models", "plain_loop", "ported_loop"):
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def results():
    return json.loads((ROOT / "benchmarks" / "results" / "third_party.json").read_text())


def test_the_table_is_the_stored_results(run, results):
    assert f"{run.BEGIN}\n\n{run.table(results)}\n\n{run.END}" in (FOLDER / "README.md").read_text()


def test_the_stored_results_are_whole(run, results):
    assert results["seeds"] == 3
    assert {(r["model"], r["policy"], r["seed"]) for r in results["runs"]} == {
        (model, policy, seed) for model in run.models.MODELS for policy in run.POLICIES for seed in range(3)
    }
    assert results["lines"] == {name: run.lines_changed() + more for name, (_, more) in run.models.MODELS.items()}


@pytest.mark.thorough(4)
@pytest.mark.parametrize("policy", ["bf16", "fp16", "fp8"])
@pytest.mark.parametrize(
    "package", ["haiku", "equinox", "transformers", "flax's examples, lm1b", "flax's examples, mnist"]
)
def test_matmuls_run_in_what_the_table_says(run, results, package, policy):
    if package.startswith("flax"):
        try:
            run.models.flax_examples.archive()
        except FileNotFoundError as missing:
            pytest.skip(str(missing))
    else:
        pytest.importorskip(package, reason="installed by the extra third-party")
    name = next(name for name in run.models.MODELS if name.startswith(package))
    if package == "transformers":
        pytest.importorskip(
            "transformers.models.gpt2.modeling_flax_gpt2", reason="this transformers has no Flax models"
        )
    is_in_vain = (package, policy) == ("haiku", "fp8")  # its convolutions have more than one pixel
    warns = pytest.warns(UserWarning, match="no-matmul-in-fp8") if is_in_vain else contextlib.nullcontext()
    with jax.numpy_rank_promotion("allow"), warns:
        share = run.share_of_low_precision(name, policy)
    assert abs(share - results["flops"][name][policy]) < 1


@pytest.mark.thorough(1)
@pytest.mark.parametrize("name", ["gpt2", "bert", "vit"])
def test_models_of_transformers_need_no_dtype(run, name):
    """Their default is float32 in every layer, which is no request."""
    pytest.importorskip(
        "transformers.models.gpt2.modeling_flax_gpt2", reason="installed by the extra third-party, with Flax models"
    )
    policy = jaxmp.get_policy("bf16", keep_fp32=())
    with jax.numpy_rank_promotion("allow"):
        model = getattr(run.models, name)(0, jax.numpy.float32)
        opt_state = jaxmp.mixed_precision(optax.sgd(0.1), policy).init(model.params)
        grad_fn = jaxmp.value_and_grad(model.loss, has_aux=True, policy=policy)
        args = policy.cast_to_param(model.params), model.state, next(model.batches(1, 0))
        flops = run.flops_of_matmuls(jax.make_jaxpr(grad_fn)(*args, opt_state=opt_state))
    assert flops["bfloat16"] > 0.99 * sum(flops.values())


@pytest.mark.thorough(0)
@pytest.mark.parametrize("policy", ["fp32", "bf16"])
def test_a_model_trains(run, policy):
    pytest.importorskip("equinox", reason="installed by the extra third-party")
    (name,) = [name for name in run.models.MODELS if name.startswith("equinox")]
    with jax.numpy_rank_promotion("allow"):
        found = run.run(name, policy, seed=0, steps=2)
    assert 0 < found["held_out"] < 7 and found["skipped"] == 0


def test_a_file_of_flax_is_executed_as_it_is(run, tmp_path, monkeypatch):
    flax_examples = sys.modules["flax_examples"]
    version = importlib.metadata.version("flax")
    monkeypatch.setattr(flax_examples, "HERE", tmp_path)
    with pytest.raises(FileNotFoundError, match=f"pip download --no-deps --no-binary flax flax=={version}"):
        flax_examples.load("mnist/train.py")
    source = b"import tensorflow as tf\nimport math\n\nAREA = math.pi\n\ndef data() -> tf.data.Dataset: ...\n"
    with tarfile.open(tmp_path / f"flax-{version}.tar.gz", "w:gz") as files:
        entry = tarfile.TarInfo(f"flax-{version}/examples/mnist/train.py")
        entry.size = len(source)
        files.addfile(entry, io.BytesIO(source))
    before = sys.modules.get("tensorflow")
    assert flax_examples.load("mnist/train.py").AREA == math.pi
    assert sys.modules.get("tensorflow") is before  # the mock is gone

"""The headline: training loops that name no dtype train in the precision of a policy, with three changed lines each."""

import difflib
import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from helpers import ROOT
from matmul_dtypes import matmuls_in

LOOPS = ROOT / "tests" / "support" / "naive_loops"

# Each line of the loops of tests/support/naive_loops that changes; `import jaxmp` counts too.
LINEN = """\
- from flax.training.train_state import TrainState
+ import jaxmp
- state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3))
+ state = jaxmp.linen.TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-3), policy=POLICY)
"""
PORTS = f"""
linen_cnn
{LINEN}-     loss, grads = jax.value_and_grad(loss_fn)(state.params, x, y)
+     loss, grads = jaxmp.value_and_grad(loss_fn)(state.params, x, y, opt_state=state)
linen_gpt
{LINEN}-     loss, grads = jax.value_and_grad(loss_fn)(state.params, tokens, key)
+     loss, grads = jaxmp.value_and_grad(loss_fn)(state.params, tokens, key, opt_state=state)
nnx_transformer
- import optax
+ import optax, jaxmp
-     loss, grads = nnx.value_and_grad(loss_fn)(model, tokens)
+     loss, grads = jaxmp.nnx.value_and_grad(loss_fn)(model, tokens, opt_state=optimizer)
- optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)
+ optimizer = jaxmp.nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param, policy=POLICY)
haiku_resnet
- import jax
+ import jax, jaxmp
-     (loss, state), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, state, x, y)
+     (loss, state), grads = jaxmp.value_and_grad(loss_fn, has_aux=True, policy=POLICY)(params, state, x, y, opt_state=opt_state)
- tx = optax.sgd(0.1, momentum=0.9)
+ tx = jaxmp.mixed_precision(optax.sgd(0.1, momentum=0.9), POLICY)
equinox_mlp
- import jax
+ import jax, jaxmp
-     loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
+     loss, grads = jaxmp.value_and_grad(loss_fn, policy=POLICY)(params, x, y, opt_state=opt_state)
- tx = optax.adam(1e-3)
+ tx = jaxmp.mixed_precision(optax.adam(1e-3), POLICY)
"""  # noqa: E501
NAMES = re.findall(r"^\w+$", PORTS, flags=re.MULTILINE)
EXTRA = {"haiku_resnet": "haiku", "equinox_mlp": "equinox"}  # packages of the dev extra


def sources(name: str) -> tuple[str, str]:
    """The source of a loop, as it is and ported."""
    naive = (LOOPS / f"{name}.py").read_text()
    lines = naive.splitlines()
    changes = re.search(rf"^{name}\n((?:[-+] .*\n)+)", PORTS, flags=re.MULTILINE)[1]
    for old, new in re.findall(r"- (.*)\n\+ (.*)\n", changes):
        assert lines.count(old) == 1, old
        lines[lines.index(old)] = new
    return naive, "\n".join(lines) + "\n"


def run(source: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "loop"}
    exec(compile(source, "loop", "exec"), namespace)
    return namespace


def source_of(name: str, policy: str | None) -> str:
    """The source of a loop, naive without a policy."""
    if name in EXTRA:
        pytest.importorskip(EXTRA[name], reason="installed by the dev extra of pyproject.toml")
    naive, ported = sources(name)
    return naive if policy is None else ported.replace("POLICY", repr(policy))


def step_of(names: dict[str, Any]) -> tuple[Any, list[jax.Array]]:
    """A training step as a function of arrays (modules split), and these arrays."""
    carry = names["carry"]
    if isinstance(carry[0], nnx.Module):
        graphdef, carry = nnx.split(carry)

        def step(state, *batch):
            *modules, loss = names["step"](*nnx.merge(graphdef, state, copy=True), *batch)
            return nnx.state(modules), loss

        return step, (carry, *names["batch"])
    return names["step"], (*carry, *names["batch"])


class Traced(NamedTuple):
    matmuls: dict[str, int]
    outputs: Any


@functools.cache
def traced(source: str) -> Traced:
    """The step of a loop, whose whole script is traced: nothing is compiled."""
    traces: list[Traced] = []

    def script() -> None:
        step, args = step_of(run(source))
        jaxpr, shapes = jax.make_jaxpr(step, return_shape=True)(*args)
        traces.append(Traced(matmuls_in(jaxpr), shapes))

    jax.eval_shape(script)
    return traces[0]


@pytest.mark.parametrize("name", NAMES)
def test_a_port_changes_three_lines(name):
    naive, ported = sources(name)
    diff = list(difflib.ndiff(naive.splitlines(), ported.splitlines()))
    assert sum(line.startswith("+ ") for line in diff) <= 3
    assert sum(line.startswith("- ") for line in diff) <= 3


CASES = [
    ("linen_cnn", "fp16", "float16"),
    ("linen_gpt", "bf16", "bfloat16"),
    ("nnx_transformer", "bf16", "bfloat16"),
    ("haiku_resnet", "16-mixed", "float16"),
    ("equinox_mlp", "mixed_bfloat16", "bfloat16"),
]


@pytest.mark.thorough(1)
@pytest.mark.parametrize(("name", "policy", "dtype"), CASES, ids=[name for name, _, _ in CASES])
def test_every_matmul_runs_in_the_dtype_of_the_policy(name, policy, dtype):
    naive, ported = (traced(source_of(name, p)).matmuls for p in (None, policy))
    assert list(naive) == ["float32"]
    assert ported == {dtype: naive["float32"]}


@pytest.mark.thorough(0)
def test_fp8_takes_one_more_line():
    """The model gets its scales where it is initialized; products of attention and the tied logits stay bfloat16."""
    ported, init = source_of("linen_gpt", "fp8"), "params = jax.jit(model.init)("
    assert ported.count(init) == 1
    matmuls = traced(ported.replace(init, "params = jaxmp.autocast(jax.jit(model.init), 'fp8')(")).matmuls
    layers = 6  # q, k, v, out, up, down; the ends are the embedding and its `attend`
    assert matmuls["float8_e4m3fn"] == layers
    assert matmuls["float8_e4m3fnxfloat8_e5m2"] == 2 * layers
    # two products of attention and the tied logits, each with two derivatives
    assert matmuls["bfloat16"] == 3 * 3


@pytest.mark.thorough(0)
def test_the_port_trains():
    def losses(names: dict[str, Any]) -> np.ndarray:
        traces.clear()
        step, args = jax.jit(lambda *args: traces.append(1) or names["step"](*args)), names["carry"]
        values = []
        for _ in range(5):
            *args, loss = step(*args, *names["batch"])
            values.append(float(loss))
        return np.asarray(values)

    traces: list[int] = []
    naive, ported = losses(run(source_of("equinox_mlp", None))), losses(run(source_of("equinox_mlp", "16-mixed")))
    assert len(traces) == 1
    np.testing.assert_allclose(ported[0], naive[0], rtol=1e-3)
    assert ported[-1] < ported[0]
    assert np.abs(ported - naive).max() < 0.02 * naive[0]


def test_params_and_results_have_the_dtypes_of_the_policy():
    state, loss = traced(source_of("linen_gpt", "bf16")).outputs
    assert {x.dtype.name for x in jax.tree.leaves(state.params)} == {"bfloat16"}
    assert loss.dtype == jnp.float32

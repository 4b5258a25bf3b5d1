"""Policies: names, jmp's vocabulary, path rules, and casts of every kind of leaf and box."""

import pickle

import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp
from helpers import assert_exact, assert_moved

PRESETS = {
    "fp32": ("float32", "float32", "float32"),
    "tf32": ("float32", "float32", "float32"),
    "fp16": ("float16", "float16", "float32"),
    "bf16": ("bfloat16", "bfloat16", "float32"),
}


def dtypes_of(policy) -> tuple[str, ...]:
    return tuple(jnp.dtype(d).name for d in (policy.param_dtype, policy.compute_dtype, policy.output_dtype))


def names_of(tree) -> dict:
    return jax.tree.map(lambda x: x.dtype.name, tree)


# Names


@pytest.mark.parametrize("name", PRESETS)
def test_presets(name):
    policy = jaxmp.get_policy(name)
    assert dtypes_of(policy) == PRESETS[name]
    tree = {"f32": jnp.ones(2), "f16": jnp.ones(2, jnp.float16), "bf16": jnp.ones(2, jnp.bfloat16)}
    for cast, dtype in zip(
        (policy.cast_to_param, policy.cast_to_compute, policy.cast_to_output), PRESETS[name], strict=True
    ):
        assert_exact(cast(tree), dict.fromkeys(tree, jnp.ones(2, dtype)))


@pytest.mark.parametrize(
    "text",
    [
        "params=float32,compute=bfloat16,output=float32",
        "params=float16,compute=float16,output=float32",
        "p=f32,c=f16,o=f32",
        "compute=bfloat16,params=full,output=half",
        "bfloat16",
        "float32",
    ],
)
def test_jmp_strings_and_policies(text):
    theirs = jmp.get_policy(text)
    for form in (text, theirs, jmp.Policy(*map(jnp.dtype, dtypes_of(theirs)))):
        policy = jaxmp.get_policy(form, keep_fp32=["*norm*"])
        assert dtypes_of(policy) == dtypes_of(theirs)
        assert policy.keep_fp32 == ("*norm*",)
        assert policy.matmul_precision is None


NAMES_ELSEWHERE = {
    "16-mixed": ("float32", "float16", "float32"),
    "fp16-mixed": ("float32", "float16", "float32"),
    "mixed_float16": ("float32", "float16", "float32"),
    "bf16-mixed": ("float32", "bfloat16", "float32"),
    "mixed_bfloat16": ("float32", "bfloat16", "float32"),
    "half": ("float16", "float16", "float16"),
    "32-true": PRESETS["fp32"],
}


@pytest.mark.parametrize("name", NAMES_ELSEWHERE)
def test_names_of_other_systems_mean_what_they_mean_there(name):
    policy = jaxmp.get_policy(name, keep_fp32="*norm*")
    assert dtypes_of(policy) == NAMES_ELSEWHERE[name]
    assert policy.keep_fp32 == ("*norm*",)
    assert policy.computes_in_16_bits == (dtypes_of(policy)[1] != "float32")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("16-true", "'16-true' means 16-bit params without float32 masters.*'fp16' has"),
        ("bf16-true", "'bf16-true' means .*'bf16' has"),
        ("O1", "'O1' is float16 in autocast with float32 params: '16-mixed'"),
        ("O2", "'fp16'"),
        ("16", "'16-mixed'"),
        ("transformer-engine", "'fp8'"),
        ("mxfp8", "recipe=jaxmp.fp8.MXFP8"),
        ("FP16", "got 'FP16', did you mean 'fp16'"),
        ("mixed-float16", "did you mean 'mixed_float16'"),
        ("64-true", "jaxmp trains in float32 at most: 'fp32'"),
        ("int4", r"a policy must be one of 'fp32', 'tf32', 'fp16', 'bf16'.* or a jmp string.*got 'int4'"),
        ("params=float32,compute", "got 'params=float32,compute'"),
    ],
)
def test_other_names_are_refused_with_the_name_to_use(name, message):
    with pytest.raises(ValueError, match=message):
        jaxmp.get_policy(name)


def test_str():
    """It shows every field that is not the default, and names the policy again."""
    for name in ("fp16", "params=float32,compute=float16,output=bfloat16"):
        policy = jaxmp.get_policy(name)
        assert str(policy) == "params={},compute={},output={}".format(*dtypes_of(policy))
        assert jaxmp.get_policy(str(policy)) == policy
        assert str(jaxmp.get_policy(policy, keep_fp32=("*norm*",))) == f"{policy} keep_fp32=('*norm*',)"
    assert str(jaxmp.get_policy("tf32")).endswith("output=float32 matmul_precision='tensorfloat32'")
    assert str(jaxmp.get_policy("fp8")).endswith(f"output=float32 recipe={jaxmp.fp8.DelayedScaling()}")
    theirs = jmp.Policy(*map(jnp.dtype, PRESETS["fp16"]))  # jmp's own raises a KeyError for dtype objects
    assert str(jaxmp.get_policy(theirs)) == "params=float16,compute=float16,output=float32"


def test_a_policy_is_a_value():
    policy = jaxmp.get_policy("fp16", keep_fp32=["*norm*"])
    same = jaxmp.get_policy("params=float16,compute=float16,output=float32", keep_fp32=("*norm*",))
    assert policy == same and hash(policy) == hash(same)
    assert policy != jaxmp.get_policy("fp16")
    assert pickle.loads(pickle.dumps(policy)) == policy
    cast = jax.jit(lambda x, policy: policy.cast_to_param(x), static_argnums=1)
    assert jax.eval_shape(lambda x: cast(x, policy), jnp.ones(2)).dtype == jnp.float16
    assert {jaxmp.get_policy(name) for name in ("fp8-delayed", "fp8-mixed")} == {jaxmp.get_policy("fp8")}


def test_rules_add_up():
    """A glob as a string is not its letters, of which `*` would keep everything."""
    policy = jaxmp.get_policy(jaxmp.get_policy("tf32", keep_fp32=("*norm*",)), keep_fp32="*bias")
    assert policy.keep_fp32 == ("*norm*", "*bias")
    assert policy.matmul_precision == "tensorfloat32"
    assert jaxmp.Policy(jnp.float16, jnp.float16, jnp.float32, "*norm*").keep_fp32 == ("*norm*",)


# Bad input


@pytest.mark.parametrize(
    "wrong, got", [(None, "NoneType"), (16, "int. Use '16-mixed'"), (jnp.float16, "the dtype float16")]
)
def test_what_is_no_policy(wrong, got):
    with pytest.raises(TypeError, match=f"a policy must be a name, a jmp string or a jmp.Policy; got ({got})"):
        jaxmp.get_policy(wrong)


@pytest.mark.parametrize(
    ("field", "dtype"),
    [("param_dtype", jnp.int32), ("compute_dtype", jnp.float8_e4m3fn), ("output_dtype", jnp.complex64)],
)
def test_a_policy_has_floats_of_16_bits_or_more(field, dtype):
    dtypes = {"param_dtype": jnp.float16, "compute_dtype": jnp.float16, "output_dtype": jnp.float32} | {field: dtype}
    with pytest.raises(ValueError, match=f"a policy's {field} must be a float of 16 bits or more; got"):
        jaxmp.Policy(**dtypes)
    with pytest.raises(ValueError, match=f"{field} must be .*; got {jnp.dtype(dtype).name}"):
        jaxmp.get_policy(jmp.Policy(**dtypes))


@pytest.mark.parametrize(
    "policy",
    ["params=float32,compute=float64,output=float32", jmp.Policy(jnp.float64, jnp.float32, jnp.float32)],
    ids=["jmp string", "jmp.Policy"],
)
def test_a_policy_does_not_train_in_float64(policy):
    """Gradients and moments are float32: the steps would be rounded without a word."""
    for take in (
        jaxmp.get_policy,
        lambda p: jaxmp.mixed_precision(optax.sgd(0.1), p),
        lambda p: jaxmp.keep_master_params(optax.sgd(0.1), p),
        lambda p: jaxmp.value_and_grad(jnp.sum, policy=p),
    ):
        with pytest.raises(ValueError, match="float16, bfloat16 or float32; got params=.*float64.*Use 'fp32'"):
            take(policy)


# Path rules


TREE = {
    "block_0": {
        "Dense_0": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)},
        "LayerNorm_0": {"scale": jnp.ones(2), "bias": jnp.ones(2)},
    },
    "stack": [jnp.ones(2), {"norm": jnp.ones(2)}],
    "router": jnp.ones(2),
}
PATHS = (
    "block_0/Dense_0/bias",
    "block_0/Dense_0/kernel",
    "block_0/LayerNorm_0/bias",
    "block_0/LayerNorm_0/scale",
    "router",
    "stack/0",
    "stack/1/norm",
)


@pytest.mark.parametrize(
    "globs, kept",
    [
        ((), ()),
        (("*NORM*",), (2, 3, 6)),
        (("*/bias", "router"), (0, 2, 4)),
        (("stack/0",), (5,)),
        (("norm",), (6,)),  # the whole path or its end, not a part in the middle
        (("*",), tuple(range(7))),
    ],
    ids=str,
)
def test_keep_fp32(globs, kept):
    policy = jaxmp.get_policy("fp16", keep_fp32=globs)
    expected = ["float32" if i in kept else "float16" for i in range(len(PATHS))]
    assert jax.tree.leaves(names_of(policy.cast_to_param(TREE))) == expected
    assert jax.tree.leaves(names_of(policy.cast_to_compute(TREE))) == expected
    assert [policy.param_dtype_of(path).name for path in PATHS] == expected
    assert set(jax.tree.leaves(names_of(policy.cast_to_output(policy.cast_to_param(TREE))))) == {"float32"}
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), TREE)
    assert jax.tree.leaves(names_of(policy.cast_to_param(half))) == expected


def test_a_bare_leaf_has_a_path_too():
    assert jaxmp.get_policy("fp16", keep_fp32=("<root>",)).cast_to_param(jnp.ones(2)).dtype == jnp.float32
    assert jaxmp.get_policy("fp16", keep_fp32=("*norm*",)).cast_to_param(jnp.ones(2)).dtype == jnp.float16


def test_boxes_add_nothing_to_the_path():
    boxed = lambda x: nn.Partitioned(x, names=("model",) * x.ndim)  # noqa: E731
    tree = flax.core.freeze(jax.tree.map(boxed, TREE["block_0"]))
    policy = jaxmp.get_policy("bf16", keep_fp32=("LayerNorm_0/scale", "Dense_0/bias"))
    cast = policy.cast_to_param(tree)
    assert jax.tree.structure(cast) == jax.tree.structure(tree)
    assert cast["Dense_0"]["kernel"].names == ("model", "model")
    assert [x.dtype.name for x in jax.tree.leaves(cast)] == ["float32", "bfloat16", "bfloat16", "float32"]


class Model(nnx.Module):
    def __init__(self, rngs):
        init = nnx.with_partitioning(nnx.initializers.ones_init(), ("in", "out"))
        self.dense = nnx.Linear(2, 2, kernel_init=init, rngs=rngs)
        self.LayerNorm = nnx.LayerNorm(2, rngs=rngs)
        self.value = nnx.Linear(2, 2, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


def test_nnx_states():
    """Paths of an nnx State are those of the module; keys and counts stay; sharding metadata comes along."""
    with jax.set_mesh(jax.make_mesh((1, 1), ("in", "out"), axis_types=(jax.sharding.AxisType.Auto,) * 2)):
        state = nnx.state(Model(nnx.Rngs(0)))
    policy = jaxmp.get_policy("fp16", keep_fp32=("layernorm/*", "value/bias"))
    cast = policy.cast_to_param(state)
    assert jax.tree.structure(cast) == jax.tree.structure(state)
    dtypes = {"/".join(path): variable.get_value().dtype.name for path, variable in nnx.to_flat_state(cast)}
    kept = {"LayerNorm/bias", "LayerNorm/scale", "value/bias"}
    assert {path for path, dtype in dtypes.items() if dtype == "float32"} == kept
    assert {path for path, dtype in dtypes.items() if dtype == "float16"} == {
        "dense/bias",
        "dense/kernel",
        "value/kernel",
    }
    rngs = cast["dropout"]["rngs"]
    assert rngs["count"].get_value().dtype == jnp.uint32
    assert jnp.issubdtype(rngs["key"].get_value().dtype, jax.dtypes.prng_key)
    assert cast["dense"]["kernel"].get_metadata() == state["dense"]["kernel"].get_metadata()


# Casts


def test_params_saturate_and_activations_do_not():
    """jmp's cast of a large param is inf, which no later step repairs. An activation that overflows must be seen."""
    large, policy = np.float32([70000.0, -1e30, np.inf, 0.1]), jaxmp.get_policy("fp16")
    assert_exact(policy.cast_to_param(large), np.float16([65504.0, -65504.0, 65504.0, 0.1]))
    assert_exact(policy.cast_to_compute(large), np.float16([np.inf, -np.inf, np.inf, 0.1]))
    bfloat16 = jnp.array([1e6, -jnp.inf, 0.5], jnp.bfloat16)
    assert_exact(policy.cast_to_param(bfloat16), np.float16([65504.0, -65504.0, 0.5]))


@pytest.mark.parametrize("name", PRESETS)
def test_what_is_no_float_is_left_alone(name):
    policy = jaxmp.get_policy(name)
    tree = {
        "n": np.arange(3),
        "key": jax.random.key(0),
        "c": np.array([1j]),
        "fp8": jnp.ones(2, jnp.float8_e5m2),
        "flag": np.array(True),
        "number": 3.0,
        "text": "text",
    }
    for cast in (policy.cast_to_param, policy.cast_to_compute, policy.cast_to_output):
        assert all(new is tree[name] for name, new in cast(tree).items())


def test_abstract_arrays_are_cast_as_arrays_are():
    """jmp leaves them float32, so that a restore target or an eval_shape is of another dtype than the params."""
    policy = jaxmp.get_policy("params=bfloat16,compute=float16,output=bfloat16", keep_fp32=("*norm*",))
    shapes = jax.eval_shape(lambda: TREE)
    for cast in (policy.cast_to_param, policy.cast_to_compute, policy.cast_to_output):
        assert jax.tree.map(lambda x: x.update(), cast(shapes)) == jax.eval_shape(cast, TREE)


def test_casts_inside_a_gradient():
    policy = jaxmp.get_policy("bf16")
    grad = jax.jit(jax.grad(lambda params: policy.cast_to_output(policy.cast_to_compute(params) * 3).sum()))
    for dtype in (jnp.float32, jnp.bfloat16):
        assert_exact(grad(jnp.ones(2, dtype)), jnp.full(2, 3.0, dtype))


# Precision of float32 matmuls


@pytest.mark.parametrize(
    "name, precision",
    [
        ("fp32", jax.lax.Precision.HIGHEST),
        ("tf32", jax.lax.Precision.HIGH),
        ("fp16", None),
        ("params=float32,compute=float32,output=float32", None),
    ],
)
def test_default_matmul_precision(name, precision):
    """`fp32` is float32 on tensor cores too, where jax's default rounds matmuls to TensorFloat-32."""

    def dots():
        jaxpr = jax.make_jaxpr(lambda x: x @ x)(jnp.ones((2, 2))).jaxpr
        return [eqn.params["precision"] for eqn in jaxpr.eqns if eqn.primitive.name == "dot_general"]

    with jaxmp.get_policy(name).default_matmul_precision():
        (inside,) = dots()
    assert inside in (precision, (precision, precision))
    assert dots() == [None]


# A jmp.Policy among others


def test_a_policy_passes_as_a_jmp_policy():
    policy = jaxmp.get_policy("bf16", keep_fp32=("*norm*",))
    half_output = policy.with_output_dtype(jnp.bfloat16)
    assert isinstance(policy, jmp.Policy) and isinstance(half_output, jaxmp.Policy)
    assert half_output.keep_fp32 == ("*norm*",)
    assert half_output.cast_to_output(jnp.ones(2)).dtype == jnp.bfloat16


@pytest.mark.parametrize(
    "policy",
    ["params=float16,compute=float16,output=float32", jmp.Policy(jnp.float16, jnp.float16, jnp.float32)],
    ids=["jmp string", "jmp.Policy"],
)
def test_every_form_of_a_policy_is_taken_everywhere(policy):
    params32, params = {"w": np.float32([0.1, 0.1])}, {"w": np.float16([0.1, 0.1])}
    mixed = jaxmp.mixed_precision(optax.sgd(1.0), policy)
    for tx in (mixed, jaxmp.keep_master_params(optax.sgd(1.0), policy)):
        assert_moved(jaxmp.get_master_params(tx.init(params32), params), params32)
    assert_exact(jaxmp.get_loss_scale(mixed.init(params32)), np.float32(2.0**16))
    assert_exact(jaxmp.linen.TrainState.create(apply_fn=len, params=params32, tx=mixed, policy=policy).params, params)
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    jaxmp.nnx.cast_to_param(model, policy)
    assert model.kernel.get_value().dtype == jnp.float16

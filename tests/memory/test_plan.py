"""`jaxmp.memory.plan`: bytes from shapes, against arrays, `eval_shape` by hand, and what a device of a mesh holds."""

import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

import jaxmp
from jaxmp import memory

S, F32 = jax.ShapeDtypeStruct, jnp.float32
SCALARS = 200  # bytes of counts and the loss scale, at most


def nbytes(tree):
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def on_device(tree):
    """Bytes that one device really holds."""
    return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(tree))


# The formula


@pytest.mark.parametrize(("policy", "a_value"), [("fp32", 4), ("bf16", 2), ("bf16-mixed", 2)])
def test_sixteen_bytes_a_parameter_and_four_or_two_an_activation(policy, a_value):
    """Micikevicius et al. 2018: Adam takes 16P + 4N in float32, 16P + 2N in 16 bits with masters."""
    params, p = {"w0": S((1000, 900), F32), "w1": S((1000, 100), F32)}, 10**6
    plan = memory.plan(params, policy, optimizer=jaxmp.mixed_precision(optax.adam(1e-3), policy))
    parts = plan.params, plan.masters, plan.gradients
    assert parts == ((2 * p, 4 * p, 2 * p) if policy == "bf16" else (4 * p, 0, 4 * p))
    assert 8 * p <= plan.optimizer <= 8 * p + SCALARS
    assert (plan.num_params, plan.activation) == (p, a_value)
    assert plan.total == plan.params + plan.masters + plan.optimizer + plan.gradients
    assert 0 <= plan.total - 16 * p <= SCALARS
    plain = plan.float32
    assert (plain.params, plain.masters, plain.optimizer, plain.gradients) == (4 * p, 0, plan.optimizer, 4 * p)
    assert (plain.num_params, plain.activation, plain.float32) == (p, 4, None)
    if policy == "bf16":  # the table has both sums
        lines = [line.split() for line in str(plan).splitlines()]
        assert lines[:2] == [["planned", "float32"], ["params", "2.00", "MB", "4.00", "MB"]]
        assert lines[2] == ["masters", "4.00", "MB", "0", "B"]
        assert lines[-3] == ["total", "16.00", "MB", "16.00", "MB"]
        assert lines[-2] == ["a", "parameter", "16.00", "B", "16.00", "B"]
        assert lines[-1] == ["an", "activation", "2", "B", "4", "B"]


def test_bytes_a_parameter_are_those_that_the_docs_promise():
    params, adam = {"w": S((2**16, 1024), F32)}, optax.adam(1e-3)
    small = jaxmp.fused_adamw(1e-3, state_dtype=jnp.int8)
    alone = optax.chain(jaxmp.float32_moments(adam), jaxmp.stochastic_round_updates(seed=0))
    jobs = [
        (12, "fp32", jaxmp.mixed_precision(adam, "fp32")),
        (14, "bf16", jaxmp.mixed_precision(adam, "bf16")),
        (12, "bf16", jaxmp.mixed_precision(adam, "bf16", remainder_bits=16)),
        (5.03, "bf16", jaxmp.mixed_precision(small, "bf16", remainder_bits=8)),
        (10, "bf16", jaxmp.unscale_and_skip(alone)),
    ]
    for expected, policy, tx in jobs:
        plan = memory.plan(params, policy, optimizer=tx)
        assert (plan.total - plan.gradients) / plan.num_params == pytest.approx(expected, abs=0.005)


# Against arrays


LABELS = {"big": "train", "norm": "train", "frozen": "frozen"}
NORM_IN_FLOAT32 = jaxmp.get_policy("bf16", keep_fp32=("norm",))
IN_FLOAT32 = jaxmp.get_policy("bf16", reduce_dtype="float32")
FROZEN = optax.multi_transform({"train": optax.adam(1e-3), "frozen": optax.set_to_zero()}, LABELS)
NOISY = optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(1)), optax.adam(1e-2))
ALONE = optax.chain(jaxmp.float32_moments(optax.adam(1e-3)), jaxmp.stochastic_round_updates(seed=0))
EIGHT = jaxmp.fused_adamw(1e-3, state_dtype=jnp.int8)
RECIPES = {
    "fp16": ("fp16", jaxmp.mixed_precision(optax.adam(1e-3), "fp16")),
    "16-mixed": ("16-mixed", jaxmp.mixed_precision(optax.adam(1e-3), "16-mixed")),
    "a norm in float32": (NORM_IN_FLOAT32, jaxmp.mixed_precision(optax.adam(1e-3), NORM_IN_FLOAT32)),
    "gradients in float32": (IN_FLOAT32, jaxmp.mixed_precision(optax.adam(1e-3), IN_FLOAT32)),
    "16 bits of remainder": ("bf16", jaxmp.mixed_precision(jaxmp.fused_adamw(1e-3), "bf16", remainder_bits=16)),
    "8 bits": ("bf16", jaxmp.mixed_precision(EIGHT, "bf16", remainder_bits=8)),
    "compressed": ("bf16", jaxmp.mixed_precision(jaxmp.compress_moments(optax.adam(1e-3), jnp.bfloat16), "bf16")),
    "averages": ("bf16", jaxmp.mixed_precision(optax.chain(optax.adam(1e-3), jaxmp.ema_params(0.99)), "bf16")),
    "frozen": ("bf16", jaxmp.mixed_precision(FROZEN, "bf16")),
    "keys": ("bf16", jaxmp.mixed_precision(NOISY, "bf16")),
    "MultiSteps": ("bf16", jaxmp.mixed_precision(optax.MultiSteps(optax.adam(1e-3), 4), "bf16")),
    "adafactor": ("bf16", jaxmp.mixed_precision(optax.adafactor(1e-3), "bf16")),
    "no masters": ("bf16", jaxmp.unscale_and_skip(ALONE)),
    "plain optax": ("bf16", optax.adam(1e-3)),
}


@pytest.mark.thorough(3)
@pytest.mark.parametrize("name", RECIPES)
def test_what_is_stored_is_what_arrays_take(name):
    policy, tx = RECIPES[name]
    params32 = {"big": jnp.ones((32, 256)), "norm": jnp.ones(256), "frozen": jnp.ones((16, 16))}
    stored = grads = jaxmp.get_policy(policy).cast_to_param(params32)
    has_masters = name not in ("no masters", "plain optax")
    opt_state = jax.jit(tx.init)(params32 if has_masters else stored)
    plan = memory.plan(jax.eval_shape(lambda: params32), policy, optimizer=tx)
    assert plan == memory.plan(params32, policy, optimizer=tx)
    if has_masters:

        def loss_fn(params):
            return sum(jnp.sum((x.astype(F32) @ jnp.ones((x.shape[-1], 16))) ** 2) for x in jax.tree.leaves(params))

        grads = jax.eval_shape(
            lambda p, s: jaxmp.value_and_grad(loss_fn, policy=policy)(p, opt_state=s)[1], stored, opt_state
        )
    assert (plan.params, plan.gradients) == (nbytes(stored), nbytes(grads))
    assert plan.masters + plan.optimizer == nbytes(opt_state)
    assert plan.masters == nbytes(optax.tree.get(opt_state, "master_params") if has_masters else ())
    assert plan.num_params == sum(x.size for x in params32.values())


def test_fp8_scales_and_histories_are_counted():
    policy = jaxmp.get_policy("fp8")
    tx, model, x = jaxmp.mixed_precision(optax.adam(1e-3), policy), nn.Dense(32, dtype=jnp.bfloat16), jnp.ones((16, 64))

    def loss_fn(params, x):
        return jnp.mean(model.apply({"params": params}, x).astype(F32) ** 2)

    with jaxmp.fp8.autocast(filter=lambda path, layer: True):
        params32 = jax.eval_shape(model.init, jax.random.key(0), x)["params"]
        params, opt_state = (jax.eval_shape(f, params32) for f in (policy.cast_to_param, tx.init))
        _, grads = jax.eval_shape(lambda p, s: jaxmp.value_and_grad(loss_fn)(p, x, opt_state=s), params, opt_state)
    plan = memory.plan(params32, policy, optimizer=tx)
    assert plan.num_params == 64 * 32 + 32
    assert (plan.params, plan.gradients) == (nbytes(params), nbytes(grads))
    assert plan.params + plan.masters + plan.optimizer == nbytes((params, opt_state))
    assert plan.float32.params == 4 * plan.num_params


def test_a_trillion_params_are_planned_and_nothing_is_allocated():
    tx = jaxmp.mixed_precision(jaxmp.fused_adamw(1e-3), "bf16", remainder_bits=16)
    plan = memory.plan({"w": S((2**20, 2**20), F32)}, "bf16", optimizer=tx)
    assert plan.params == plan.masters == plan.gradients == 2 * 2**40
    assert "15.39 TB" in str(plan)


# Meshes

SPECS = {"w0": P("data"), "w1": P("data", "model"), "w2": P()}
MATRICES = {"w0": S((32, 64), F32), "w1": S((64, 256), F32), "w2": S((256, 8), F32)}


def mesh_of(shape=(4, 2)):
    return jax.make_mesh(shape, ("data", "model"), axis_types=(AxisType.Auto,) * 2)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("name", ["fp16", "8 bits", "adafactor", "plain optax"])
def test_a_device_holds_what_xla_gives_it(name):
    """The arguments of a compiled program, with moments and masters cut as their params are."""
    policy, tx = RECIPES[name]
    mesh = mesh_of()

    def put(x, spec):
        return S(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

    def like_param(path, x):
        owner = next((key.key for key in path if getattr(key, "key", None) in SPECS), None)
        split = zip(x.shape, SPECS[owner] if owner and x.ndim == 2 else (), strict=False)
        return put(x, P(*(axis if axis and n % mesh.shape[axis] == 0 else None for n, axis in split)))

    stored = {key: put(S(x.shape, jaxmp.get_policy(policy).param_dtype), SPECS[key]) for key, x in MATRICES.items()}
    start = stored if name == "plain optax" else MATRICES
    arguments = stored, jax.tree_util.tree_map_with_path(like_param, jax.eval_shape(tx.init, start))
    held = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(arguments))
    for at in (mesh, mesh.abstract_mesh):
        places = {key: NamedSharding(at, spec) for key, spec in SPECS.items()}
        plan = memory.plan(MATRICES, policy, optimizer=tx, places=places)
        assert plan.params + plan.masters + plan.optimizer == held
        assert plan.num_params == 32 * 64 + 64 * 256 + 256 * 8
        assert plan.gradients == plan.params
    compiled = jax.jit(lambda *args: args, donate_argnums=(0, 1)).lower(*arguments).compile()
    assert compiled.memory_analysis().argument_size_in_bytes == held


def test_one_place_holds_for_all_that_is_below_it():
    tx, mesh = optax.adam(1e-3), AbstractMesh((8,), ("data",))
    params = {"a": MATRICES, "b": {"w": S((16, 4), F32)}}
    whole, cut = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    one = memory.plan(params, "fp32", optimizer=tx, places=cut)
    assert one == memory.plan(params, "fp32", optimizer=tx, places=jax.tree.map(lambda _: cut, params))
    part = memory.plan(params, "fp32", optimizer=tx, places={"a": whole, "b": cut})
    assert part.params == nbytes(MATRICES) + 16 * 4 * 4 // 8


def test_params_that_lie_on_a_mesh_say_so_themselves():
    mesh, tx = mesh_of(), jaxmp.mixed_precision(optax.adam(1e-3), "fp16")
    params32 = {"w": jax.device_put(jnp.ones((16, 8)), NamedSharding(mesh, P("data", "model"))), "b": jnp.ones(8)}
    plan = memory.plan(params32, "fp16", optimizer=tx)
    params, opt_state = jaxmp.get_policy("fp16").cast_to_param(params32), tx.init(params32)
    assert plan.params == on_device(params)
    assert plan.params + plan.masters + plan.optimizer == on_device((params, opt_state))
    abstract = jax.tree.map(lambda x: S(x.shape, x.dtype, sharding=x.sharding), params32)
    assert memory.plan(abstract, "fp16", optimizer=tx) == plan
    whole = memory.plan(params32, "fp16", optimizer=tx, places=NamedSharding(mesh, P()))
    assert whole.params == (16 * 8 + 8) * 2


def test_what_lies_in_host_memory_is_not_on_the_device():
    mesh, tx = AbstractMesh((8,), ("data",)), jaxmp.mixed_precision(optax.adam(1e-3), "bf16")
    host, here = (NamedSharding(mesh, P(), memory_kind=kind) for kind in ("pinned_host", "device"))
    params = {"a": S((16, 4), F32), "b": S((8, 4), F32)}
    part, whole = (memory.plan(params, "bf16", optimizer=tx, places={"a": place, "b": here}) for place in (host, here))
    assert (whole.params - part.params, whole.masters - part.masters) == (2 * 64, 4 * 64)


@pytest.mark.parametrize("spec", [P(None, "data"), P("data")], ids=["across groups", "along rows"])
def test_scales_that_the_devices_do_not_divide_are_whole(spec):
    """Five groups in a row of 160 on eight devices, as `sharding_of` lays them out."""
    tx, place = RECIPES["8 bits"][1], NamedSharding(AbstractMesh((8,), ("data",)), spec)
    params = {"w": S((40, 160), F32)}
    plan = memory.plan(params, "bf16", optimizer=tx, places={"w": place})
    places = jaxmp.sharding_of(tx, params, {"w": place})
    parts = jax.tree.map(lambda x, s: S(s.shard_shape(x.shape), x.dtype), jax.eval_shape(tx.init, params), places)
    assert plan.masters + plan.optimizer == nbytes(parts)


def test_boxes_of_flax_are_params_like_others():
    """nn.Partitioned, with flax's own shardings."""
    tx, mesh = jaxmp.mixed_precision(optax.adam(1e-3), "bf16"), mesh_of()
    kernel_init = nn.with_partitioning(nn.initializers.ones, ("data", "model"))
    boxed = jax.eval_shape(nn.Dense(32, kernel_init=kernel_init).init, jax.random.key(0), S((8, 64), F32))["params"]
    for params in (boxed, nn.unbox(boxed)):
        plan = memory.plan(params, "bf16", optimizer=tx, places=nn.get_sharding(boxed, mesh))
        assert plan.params == plan.gradients == 64 * 32 * 2 // 8 + 32 * 2
        assert plan.masters == 2 * plan.params
        assert 4 * plan.params <= plan.optimizer <= 4 * plan.params + SCALARS


def test_fp8_scales_are_whole_on_every_device():
    policy, model = jaxmp.get_policy("fp8"), nn.Dense(64)
    with jaxmp.fp8.autocast(filter=lambda path, layer: True):
        params = jax.eval_shape(model.init, jax.random.key(0), S((16, 64), F32))["params"]
    tx, mesh = jaxmp.mixed_precision(optax.adam(1e-3), policy), AbstractMesh((8,), ("fsdp",))
    places = jax.tree.map(lambda x: NamedSharding(mesh, P("fsdp") if x.ndim == 2 else P()), params)
    one, cut = (memory.plan(params, policy, optimizer=tx, places=at) for at in (None, places))
    saved = 64 * 64 * 4 * 7 // 8
    assert (one.params - cut.params, one.gradients - cut.gradients) == (saved, saved)
    assert one.optimizer - cut.optimizer == 2 * saved


# Bad input


MESH = AbstractMesh((4,), ("data",))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"policy": 16}, TypeError, "a policy must be a name, a jmp string or a jmp.Policy; got int"),
        ({"policy": optax.sgd(0.1)}, TypeError, "a policy must be a name, .*; got an optimizer"),
        ({"optimizer": optax.sgd}, TypeError, "must be an optax.GradientTransformation.*got function"),
        ({"params": optax.sgd(0.1)}, TypeError, "params must be arrays or jax.ShapeDtypeStructs; got function at"),
        ({"params": nnx.Linear(2, 3, rngs=nnx.Rngs(0))}, TypeError, r"got an nnx module. Pass nnx.state\(model, nnx.P"),
        ({"places": {"w": P("data")}}, TypeError, r"must be NamedShardings, as .*; got P\w* at w"),
        ({"places": MESH}, TypeError, "must be NamedShardings, as .*; got AbstractMesh at <root>"),
        ({"places": {"v": NamedSharding(MESH, P())}}, ValueError, r"must match the params; got none for w"),
        (
            {"places": {"w": NamedSharding(MESH, P(None, "data"))}},
            ValueError,
            r"got shape \(16, 6\) at w, cut over 4 in",
        ),
        ({"places": {"w": NamedSharding(MESH, P(None, None, "data"))}}, ValueError, "at w, which has fewer dimensions"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_bad_input_is_named(changes, error, message):
    arguments = {"params": {"w": S((16, 6), F32)}, "policy": "bf16", "places": None}
    arguments |= {"optimizer": jaxmp.mixed_precision(optax.sgd(0.1), "bf16"), **changes}
    with pytest.raises(error, match=message):
        memory.plan(**arguments)

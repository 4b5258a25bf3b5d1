"""`by_platform` and `when`: the platform is chosen when a program is lowered, under every transformation of jax."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.experimental import io_callback
from jax.sharding import Mesh, PartitionSpec as P

from helpers import assert_exact
from pallas_kernels.by_platform import PLATFORMS, by_platform
from pallas_kernels.when import known, when
from platforms import text_for, ways_of

TRUE, FALSE = jnp.bool_(True), jnp.bool_(False)


def double(x):
    return 2.0 * x


def as_sine(f, x):
    """A way that a reader of the program can tell from others: sin(x) * 0 is there."""
    return f(x) + 0.0 * jnp.sin(x)


def as_cosine(f, x):
    return f(x) + 0.0 * jnp.cos(x)


def branches(text):
    return text.count("stablehlo.case") + text.count("stablehlo.if")


def step(taken, x, old):
    return when(taken, lambda old: old - 0.5 * x, old)


# --- by_platform -----------------------------------------------------------------------------------------------------


def test_the_platform_of_the_lowering_chooses():
    f = lambda x: by_platform(double, x, cuda=as_sine, cpu=as_cosine)  # noqa: E731
    traced = jax.jit(f).trace(jnp.ones(3))
    found = {p: traced.lower(lowering_platforms=(p,)).as_text() for p in PLATFORMS}
    assert {p for p, text in found.items() if "sine" in text.replace("cosine", "")} == {"cuda"}
    assert {p for p, text in found.items() if "cosine" in text} == {"cpu"}
    assert_exact(jax.jit(f)(jnp.ones(3)), 2 * np.ones(3, np.float32))
    default = text_for(lambda x: by_platform(double, x, default=as_sine, cpu=as_cosine), jnp.ones(3), platform="tpu")
    assert "sine" in default and "cosine" not in default


@pytest.mark.parametrize("how", ["jit", "scan", "grad", "vmap", "remat"])
def test_in_a_loop_or_a_transformation_too_one_way_is_left(how):
    """`lax.platform_dependent` is a conditional inside a scan."""

    def f(x):
        of = lambda x: jnp.sum(by_platform(double, x, cuda=as_sine))  # noqa: E731
        if how == "scan":
            return lax.scan(lambda c, x: (c + of(x), None), 0.0, x)[0]
        if how == "vmap":
            return jax.vmap(of)(x)
        if how == "grad":
            return jax.grad(of)(x)
        return jax.checkpoint(of)(x) if how == "remat" else of(x)

    for platform in PLATFORMS:
        text = text_for(f, jnp.ones((4, 3)), platform=platform)
        assert branches(text) == 0
        assert ("sine" in text) == (platform == "cuda" and how in ("jit", "scan", "remat"))


def test_the_transpose_of_a_linear_function():
    """jax transposes what a derivative rule computes with tangents."""

    @jax.custom_jvp
    def f(x, y):
        return by_platform(lambda x, y: x * y, x, y, cuda=lambda f, x, y: f(x, y))

    f.defjvp(lambda primals, tangents: (f(*primals), f(tangents[0], primals[1]) + f(primals[0], tangents[1])))
    x, y = jnp.arange(3.0), jnp.ones(3)
    run = lambda x, y: jnp.sum(f(x, y) ** 2)  # noqa: E731
    assert_exact(jax.jit(jax.grad(run, (0, 1)))(x, y), jax.grad(lambda x, y: jnp.sum((x * y) ** 2), (0, 1))(x, y))


def test_without_a_trace_the_place_of_the_arrays_chooses():
    calls = []
    way = lambda f, x: calls.append(None) or f(x)  # noqa: E731
    assert_exact(by_platform(double, np.float32(2.0), cpu=way), np.float32(4.0))
    assert_exact(by_platform(double, jnp.ones(2), cpu=way, cuda=as_sine), np.full(2, 2.0, np.float32))
    assert len(calls) == 2


def test_the_function_is_traced_once_and_may_close_over_traced_arrays():
    calls = []

    def f(x, y):
        def g(x):
            calls.append(0)
            return {"sum": x["x"] + y, "none": None}

        return by_platform(g, {"x": x}, cpu=lambda g, x: g(x))

    assert_exact(jax.jit(f)(jnp.ones(2), jnp.ones(2)), {"sum": np.full(2, 2.0, np.float32), "none": None})
    assert len(calls) == 1


@pytest.mark.parametrize(("derivative", "slope", "bend"), [("default", 2.0, 0.0), ("cpu", 24.0, 48.0)])
def test_the_way_that_is_differentiated_is_named(derivative, slope, bend):
    """Forward and backward, and the second derivative."""

    def f(x):
        return by_platform(double, x, cpu=lambda f, x: f(x) ** 3, derivative=derivative)

    def slopes(x):
        return jax.grad(f)(x), jax.jvp(f, (x,), (1.0,))[1], jax.grad(jax.checkpoint(f))(x)

    assert_exact(jax.jit(slopes)(1.0), (slope,) * 3)
    assert_exact(jax.grad(f)(1.0), slope)
    assert_exact(jax.jit(jax.hessian(f))(1.0), bend)


def test_under_vmap_the_default_runs_with_the_name_of_the_axis():
    f = lambda x: by_platform(lambda x: x - lax.pmean(x, "batch"), x, cpu=as_sine)  # noqa: E731
    x = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    expected = x - x.mean(0, keepdims=True)
    batched = jax.vmap(f, axis_name="batch")
    assert_exact(batched(x), expected)
    assert "sine" not in text_for(batched, x, platform="cpu")
    outer = jax.vmap(batched, in_axes=1, out_axes=1)
    assert_exact(jax.jit(outer)(np.stack([x, x], 1)), np.stack([expected, expected], 1))
    mixed = jax.vmap(lambda x, y: by_platform(lambda x, y: (x * y, y), x, y), in_axes=(0, None))
    assert_exact(jax.jit(mixed)(x, np.float32(2.0)), (2 * x, np.full(2, 2.0, np.float32)))


def test_ways_that_can_be_mapped_run_under_vmap_and_keep_their_derivative():
    f = lambda x, y: by_platform(lambda x, y: x @ y, x, y, cuda=lambda _, x, y: jnp.sin(x) @ y, maps=True)  # noqa: E731
    x, y = jnp.arange(12.0).reshape(2, 2, 3), jnp.ones((3, 2))
    run = jax.vmap(jax.vmap(f, in_axes=(0, None)), in_axes=(0, 1))
    for platform in PLATFORMS:
        text = text_for(run, x, y, platform=platform)
        assert branches(text) == 0 and ("sine" in text) == (platform == "cuda")
    found = jax.grad(lambda x: jnp.sum(run(x, y)))(x)
    assert_exact(found, jnp.ones_like(x))


def test_the_jaxpr_does_not_depend_on_the_backend(monkeypatch):
    """The same traced program serves every platform; its text names the platforms alone."""

    def f(x, taken):
        return step(taken, by_platform(double, x, cuda=as_sine), x)

    found = []
    for backend in ("cpu", "gpu", "tpu"):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        found.append(str(jax.make_jaxpr(f)(jnp.ones(3), TRUE)))
    assert found[0] == found[1] == found[2]
    assert "(cuda)" in found[0] and "(cpu, default)" in found[0] and " at 0x" not in found[0]


# --- when ------------------------------------------------------------------------------------------------------------


def test_a_program_for_a_cpu_branches_and_others_select():
    args = TRUE, jnp.ones(3), jnp.zeros(3)
    for platform in PLATFORMS:
        text = text_for(step, *args, platform=platform)
        assert branches(text) == (platform == "cpu")
        assert ("stablehlo.select" in text) == (platform != "cpu")
    for taken in (True, False):
        expected = np.full(3, -0.5 if taken else 0.0, np.float32)
        assert_exact(jax.jit(step)(taken, *args[1:]), expected)
        with ways_of("cuda"):
            assert_exact(jax.jit(lambda *a: step(*a))(taken, *args[1:]), expected)


def test_a_known_decision_is_a_python_if():
    """Nothing is traced, and what is not taken is what was there, not a copy."""
    calls = []

    def move(x, y):
        calls.append(type(x))
        return x + 1, y

    old = jnp.zeros(3), jnp.ones(2)
    new = when(FALSE, move, *old)
    assert new[0] is old[0] and new[1] is old[1] and not calls
    assert_exact(when(TRUE, move, *old)[0], jnp.ones(3))
    assert not issubclass(calls[0], jax.core.Tracer)
    program = jax.make_jaxpr(lambda x: when(np.bool_(True), lambda x: x + 1, x))(old[0])
    assert {eqn.primitive.name for eqn in program.eqns} == {"add"}
    assert (known(TRUE), known(np.bool_(False))) == (True, False)
    assert jax.jit(lambda x: jnp.bool_(known(x) is None))(TRUE)


def test_results_have_the_dtypes_of_the_old():
    """A Python float stands for an array of what `move` returns."""
    old = jnp.zeros(3, jnp.bfloat16), -0.0
    move = lambda x, _: (x.astype(jnp.float32) + 1, jnp.full((2, 2), 3.0, jnp.float16))  # noqa: E731
    for f in (when, jax.jit(when, static_argnums=(1, 3))):
        for taken in (True, False):
            given = (old[0], old[1]) if f is when and taken else old
            first, second = f(jnp.bool_(taken), move, *given)
            assert first.dtype == jnp.bfloat16 and not first.weak_type
            assert_exact(first, jnp.full(3, float(taken), jnp.bfloat16))
            if f is when and not taken:
                assert second is old[1]  # nobody knows the shape: nothing was traced
            else:
                assert_exact(second, jnp.full((2, 2), 3.0 if taken else -0.0, jnp.float16))


def test_other_selects_for_other_platforms():
    choose = lambda taken, new, old: jax.tree.map(lambda n, o: n * taken + o * ~taken, new, old)  # noqa: E731
    f = lambda taken, x: when(taken, lambda x: x + 1, x, choose=choose)  # noqa: E731
    assert "stablehlo.select" not in text_for(f, TRUE, jnp.ones(3), platform="cuda")
    with ways_of("tpu"):
        assert_exact(jax.jit(lambda *a: f(*a))(TRUE, jnp.ones(3)), jnp.full(3, 2.0))


def test_in_a_scan_a_branch_for_a_cpu_and_none_for_a_gpu():
    def f(flags, x):
        return lax.scan(lambda x, taken: (step(taken, jnp.ones(3), x), None), x, flags)[0]

    flags, x = jnp.array([True, False, True]), jnp.zeros(3)
    assert branches(text_for(f, flags, x, platform="cpu")) == 1
    assert branches(text_for(f, flags, x, platform="cuda")) == 0
    assert_exact(jax.jit(f)(flags, x), jnp.full(3, -1.0))
    assert_exact(f(flags, x), jnp.full(3, -1.0))


def test_derivatives_are_those_of_what_was_chosen():
    """Nothing comes back through a step that is not taken: a select would send 0 * NaN."""

    def f(x, taken):
        return jnp.sum(when(taken, lambda old: old + x**3, x**2))

    @jax.jit
    def derivatives(x, taken):
        gradients = jax.grad(f)(x, taken), jax.grad(jax.checkpoint(f))(x, taken)
        return *gradients, jax.jvp(lambda x: f(x, taken), (x,), (x,))[1], jax.hessian(f)(x, taken)

    x = np.float32([1, 2])
    for taken in (True, False):
        slope, bend = (2 * x + 3 * x**2, 2 + 6 * x) if taken else (2 * x, 2 + 0 * x)
        assert_exact(derivatives(x, taken), (slope, slope, np.sum(slope * x), np.diag(bend)))
        assert_exact(jax.grad(f)(x, jnp.bool_(taken)), slope)
    root = jax.jit(jax.grad(lambda x, taken: when(taken, lambda old: old + jnp.sqrt(x), x)))
    assert_exact(root(jnp.float32(-1.0), FALSE), jnp.float32(1.0))
    assert np.isnan(root(jnp.float32(-1.0), TRUE))


def test_under_vmap_each_decides_for_itself():
    x, flags = np.arange(6.0, dtype=np.float32).reshape(3, 2), np.array([True, False, True])
    expected = np.where(flags[:, None], 0.5 * x, x)
    assert_exact(jax.vmap(step)(flags, x, x), expected)
    assert_exact(jax.jit(jax.vmap(step))(flags, x, x), expected)
    assert_exact(jax.jit(jax.vmap(step, in_axes=(None, 0, 0)))(TRUE, x, x), 0.5 * x)


@pytest.mark.parametrize("over", ["vmap", "pmap"])
def test_members_that_agree_decide_together(over):
    def among(good, x):
        taken = lax.pmin(good.astype(jnp.int32), "member") > 0
        return when(taken, lambda old: old - lax.pmean(old, "member"), x)

    x, flags = np.arange(6.0, dtype=np.float32).reshape(3, 2), np.array([True, False, True])
    together = jax.jit(jax.vmap(among, axis_name="member")) if over == "vmap" else jax.pmap(among, axis_name="member")
    assert_exact(together(flags, x), x)
    assert_exact(together(np.ones(3, bool), x), x - x.mean(0, keepdims=True))


@pytest.mark.thorough(1)
@pytest.mark.parametrize("check_vma", [True, False])
def test_in_shard_map_devices_that_agree_branch_together(check_vma):
    """With a psum inside of the branch; params that are split, whole ones, and a Python float."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def f(g, split, whole):
        taken = lax.pmax(jnp.any(~jnp.isfinite(g)).astype(jnp.int32), "data") == 0
        move = lambda split, whole, _: (split - g, whole - lax.psum(g, "data"), g * 2)  # noqa: E731
        return when(taken, move, split, whole, -0.0)

    spread = jax.shard_map(
        f, mesh=mesh, in_specs=(P("data"), P("data"), P()), out_specs=(P("data"), P(), P("data")), check_vma=check_vma
    )
    g, split, whole = np.arange(8, dtype=np.float32), np.full(8, 10, np.float32), np.float32([100])
    run, expected = jax.jit(spread), (10 - g, whole - 28, 2 * g)
    assert_exact(run(g, split, whole), expected)
    assert_exact(spread(g, split, whole), expected)
    bad = np.where(g == 5, np.float32(np.nan), g)
    assert_exact(run(bad, split, whole), (split, whole, np.full(8, -0.0, np.float32)))
    for platform, count in (("cuda", 0), ("cpu", 1)):
        assert branches(text_for(spread, g, split, whole, platform=platform)) == count


def test_in_shard_map_a_decision_that_varies_makes_results_that_vary():
    mesh = Mesh(np.array(jax.devices()[:4]), "data")
    f = lambda taken, whole: when(taken[0], lambda old: old + 1, whole)  # noqa: E731
    spread = jax.shard_map(f, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    assert_exact(jax.jit(spread)(np.array([1, 0, 1, 0], bool), jnp.zeros(1)), np.float32([1, 0, 1, 0]))


@pytest.mark.parametrize("ordered", [True, False])
def test_a_callback_runs_once_in_a_step_that_is_taken_and_never_in_another(ordered):
    seen = []

    @jax.jit
    def f(taken, x):
        def move(x):
            io_callback(lambda x: seen.append(float(x)), None, x[0], ordered=ordered)
            return x + 1

        return when(taken, move, x)

    x = jnp.zeros(2)
    for taken in (True, False, True):
        x = f(taken, x)
    jax.effects_barrier()
    assert seen == [0.0, 1.0]
    assert_exact(x, np.full(2, 2.0, np.float32))


def test_one_export_for_two_platforms():
    f = jax.jit(lambda taken, x: step(taken, by_platform(double, x, cuda=as_sine), x))
    args = TRUE, jnp.ones(3)
    exported = export.export(f, platforms=("cpu", "cuda"))(*args)
    assert exported.platforms == ("cpu", "cuda")
    assert_exact(exported.call(*args), f(*args))
    assert_exact(exported.call(FALSE, args[1]), args[1])
    of_gpu = export.export(f, platforms=("cuda",))(*args).mlir_module()
    assert "sine" in of_gpu and branches(of_gpu) == 0


def test_the_partitions_hint_reaches_a_way_that_partitions():
    """jax tells a lowering its devices only if it finds `custom_partitioning` in the program."""
    from jax.experimental.custom_partitioning import custom_partitioning

    @custom_partitioning
    def split(x):
        return x + 1

    split.def_partition(
        partition=lambda mesh, args, result: (mesh, lambda x: x + 1, args[0].sharding, (args[0].sharding,)),
        infer_sharding_from_operands=lambda mesh, args, result: args[0].sharding,
        sharding_rule="i -> i",
    )
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    x = jax.device_put(jnp.zeros(8), jax.NamedSharding(mesh, P("d")))
    f = jax.jit(functools.partial(by_platform, lambda x: x + 1, cpu=lambda _, x: split(x), partitions=True))
    assert_exact(f(x), jnp.ones(8))
    assert "all-gather" not in f.lower(x).compile().as_text()

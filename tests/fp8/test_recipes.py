"""From amaxes to scales, against traces of TransformerEngine's kernels and tables of every cast."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

from helpers import assert_exact, assert_moved
from jaxmp._src.fp8.current import CurrentScaling
from jaxmp._src.fp8.delayed import AmaxState, DelayedScaling
from jaxmp._src.fp8.scale_equations import scale_from_amax
from jaxmp.casting import saturating_cast
from oracle_data import load, load_arrays, name_of

FUSED = load("te_delayed_scaling")
TE_JAX = load("te_jax_delayed_scaling")
FROM_AMAX = load("te_scale_from_amax")
CASTS = load_arrays("fp8_cast_tables")

FLOAT32 = np.finfo(np.float32)
FP8_MAX = {"E4M3": 448.0, "E5M2": 57344.0}
STEPS = max(len(case["amaxes"]) for case in FUSED["cases"])  # shorter cases end in steps that were not run
EDGES = np.array(
    [0.0, -0.0, 1e-45, 1e-42, FLOAT32.tiny, 1.3e-36, 1.0, 448.0, FLOAT32.max, np.inf, -np.inf, np.nan, -np.nan, -1.0],
    np.float32,
)


def amaxes_of(case) -> np.ndarray:
    return np.array([[0.0 if a is None else a for a in row] for row in case["amaxes"]], np.float32)


def recipe_of(case) -> tuple:
    """What a recipe is made of, apart from its semantics; e5m2 is what gradients take under HYBRID."""
    return case["history_len"], case["algo"], case["fmt"], case["margin"]


def make(key, **kwargs) -> DelayedScaling:
    length, algo, _, margin = key
    return DelayedScaling(margin=margin, amax_history_len=length, amax_compute=algo, **kwargs)


def scan(recipe, amaxes, backward=False) -> AmaxState:
    """The states after each step."""

    @jax.jit
    def run(state, amaxes):
        def step(state, amax):
            state = recipe.update(state, amax, backward=backward)
            return state, state

        return jax.lax.scan(step, state, amaxes)[1]

    return jax.tree.map(np.asarray, run(recipe.init(amaxes.shape[1:], backward=backward), amaxes))


@functools.cache
def run_all(key) -> dict[str, AmaxState]:
    """The traces of all cases with one recipe: they run side by side, as tensors of one state."""
    cases = [case for case in FUSED["cases"] if recipe_of(case) == key]
    columns = [np.pad(amaxes_of(case), ((0, STEPS - len(case["amaxes"])), (0, 0))) for case in cases]
    recipe = make(key, power_of_two=False, semantics="te")
    states = scan(recipe, np.concatenate(columns, axis=1), backward=key[2] == "E5M2")
    traces, start = {}, 0
    for case, column in zip(cases, columns, strict=True):
        part = slice(start, start + column.shape[1])
        steps = len(case["amaxes"])
        traces[case["name"]] = AmaxState(states.scale[:steps, part], states.amax_history[:steps, :, part])
        start = part.stop
    return traces


# TransformerEngine


@pytest.mark.thorough(3)
@pytest.mark.parametrize("case", FUSED["cases"], ids=name_of)
def test_te_semantics_are_the_fused_bulk_update(case):
    trace = run_all(recipe_of(case))[case["name"]]
    assert_exact(trace.scale, np.array([row[1] for row in case["trace"]], np.float32))
    if len(case["trace"][0]) == 5:  # histories were recorded where they are short
        histories = np.array([row[4] for row in case["trace"]], np.float32)
        assert_exact(trace.amax_history, histories.reshape(trace.amax_history.shape))


# TransformerEngine's JAX functions round as the fused kernel does, but an amax that is tiny gives them an infinite
# scale, a zero rolls into the history, and a NaN there freezes the scale: `equal_to_fused_bulk` is false.
ALIKE = [case for case in TE_JAX["cases"] if case["equal_to_fused_bulk"]]


@pytest.mark.thorough(2)
@pytest.mark.parametrize("case", ALIKE, ids=name_of)
def test_te_semantics_are_those_of_te_jax(case):
    (fused,) = [fused for fused in FUSED["cases"] if fused["name"] == case["name"]]
    trace = run_all(recipe_of(fused))[case["name"]]
    assert_exact(trace.scale, np.array([row[0] for row in case["trace"]], np.float32))
    if len(case["trace"][0]) == 2 and not case["name"].startswith("zero_amax"):
        histories = np.array([row[1] for row in case["trace"]], np.float32)
        assert_exact(trace.amax_history, histories.reshape(trace.amax_history.shape))


def test_what_te_jax_does_not_do_alike_is_what_we_know_of():
    names = {case["name"].rsplit("_L")[0] for case in TE_JAX["cases"] if not case["equal_to_fused_bulk"]}
    assert names == {"tiny_amax", "zero_amax", "nan_amax"}
    assert len(ALIKE) == 54


@pytest.mark.thorough(2)
@pytest.mark.parametrize("row", FROM_AMAX["rows"], ids=lambda r: f"{r['fmt']}-pow2={r['pow2']}-{r['amax_epsilon']:g}")
def test_current_scaling_is_the_cuda_rule(row):
    """The Python reference of TransformerEngine differs for inf and NaN only; its kernels are what trains."""
    recipe = CurrentScaling(power_of_two=bool(row["pow2"]), amax_epsilon=row["amax_epsilon"])
    amax = np.array(FROM_AMAX["amax"], np.float32)
    scale = jax.jit(functools.partial(recipe.scale, backward=row["fmt"] == "E5M2"))(amax)
    assert_exact(scale, np.array(row["cuda"], np.float32))


@pytest.mark.thorough(1)
@pytest.mark.parametrize(
    "row", FUSED["scale_formula"]["rows"], ids=lambda r: f"{r['fmt']}-margin={r['margin']}-{r['old_scale']}"
)
def test_the_formula_on_a_grid(row):
    """Of the unfused update, which multiplies by a reciprocal: an ulp. v0.6 took powers of two.

    Where fp8_max / amax is inf before the margin divides it, the fused update is the better one.
    """
    amax = np.array(FUSED["scale_formula"]["amax"], np.float32)
    formula = functools.partial(
        scale_from_amax, fp8_max=FP8_MAX[row["fmt"]], margin=row["margin"], fallback=row["old_scale"]
    )
    in_range = ~((amax > 0) & (amax < 1e-35))
    scale = np.asarray(jax.jit(functools.partial(formula, power_of_two=False))(amax))
    head = np.array(row["head"], np.float32)
    assert scale.dtype == np.float32
    assert np.abs(scale[in_range].view(np.int32) - head[in_range].view(np.int32)).max() <= 1
    if row["margin"] == 0:
        assert_exact(scale[~in_range], head[~in_range])
    in_range &= ~np.isinf(amax)  # of which v0.6 made the reciprocal of the scale
    assert_exact(np.asarray(jax.jit(formula)(amax))[in_range], np.array(row["v0.6_pow2"], np.float32)[in_range])


# The rule of jaxmp


@pytest.mark.parametrize("algo", ["max", "most_recent"])
def test_an_amax_that_is_no_observation_changes_nothing(algo):
    recipe = DelayedScaling(amax_history_len=3, amax_compute=algo)
    update, first = jax.jit(recipe.update), recipe.init()
    later = update(update(first, np.float32(3.0)), np.float32(100.0))
    for bad in (np.inf, np.nan, -np.nan, -np.inf, 0.0, -0.0, -1.0):
        for state in (first, later):
            assert_moved(update(state, np.float32(bad)), state)


@pytest.mark.thorough(2)
@pytest.mark.parametrize("key", sorted({recipe_of(case) for case in FUSED["cases"]}, key=str)[::8], ids=str)
def test_without_bad_amaxes_the_semantics_agree(key):
    cases = [case for case in FUSED["cases"] if recipe_of(case) == key]
    amaxes = np.concatenate([amaxes_of(case)[:3] for case in cases], axis=1)
    amaxes = np.where(np.isfinite(amaxes), amaxes, 0.0)
    te, ours = (scan(make(key, power_of_two=False, semantics=s), amaxes) for s in ("te", "jaxmp"))
    assert_exact(ours, te)


def test_te_semantics_let_an_inf_freeze_the_scale_and_jaxmp_does_not():
    """While it is frozen, amaxes of 16 are cast with a scale for 4: they saturate."""
    amaxes = np.array([4.0, np.inf, 16.0, 16.0, 16.0], np.float32)
    te = scan(DelayedScaling(amax_history_len=3, semantics="te"), amaxes)
    ours = scan(DelayedScaling(amax_history_len=3), amaxes)
    assert_exact(te.scale, np.array([64, 64, 64, 64, 16], np.float32))
    assert_exact(ours.scale, np.array([64, 64, 16, 16, 16], np.float32))
    assert np.isinf(te.amax_history[1:3]).any(axis=1).all()
    assert np.all(np.isfinite(ours.amax_history))


def test_a_function_of_the_history():
    def mean(history):
        return jnp.mean(history, axis=0)

    recipe = DelayedScaling(amax_history_len=2, amax_compute=mean, fp8_format="E4M3", power_of_two=False)
    update = jax.jit(recipe.update)
    state = update(update(recipe.init((2,)), jnp.array([4.0, 8.0])), jnp.array([12.0, 8.0]))
    assert_exact(state.scale, jnp.array([56.0, 56.0]))
    wrong = DelayedScaling(amax_history_len=2, amax_compute=jnp.max)
    with pytest.raises(ValueError, match=r"amax_compute reduces axis 0 of a history \(2, 2\), to \(2,\); got \(\)"):
        wrong.update(wrong.init((2,)), jnp.ones(2))


def test_formats():
    assert DelayedScaling().init((2,)).amax_history.shape == (1024, 2)
    for fmt, largest in (("HYBRID", jnp.float8_e5m2), ("E4M3", jnp.float8_e4m3fn)):
        delayed, current = DelayedScaling(amax_history_len=1, fp8_format=fmt), CurrentScaling(fp8_format=fmt)
        assert delayed.dtype() == current.dtype() == jnp.float8_e4m3fn
        assert delayed.dtype(backward=True) == current.dtype(backward=True) == largest

        @jax.jit
        def scales(amax, delayed=delayed, current=current):
            state = delayed.update(delayed.init(backward=True), amax, backward=True)
            return state.scale, current.scale(amax, backward=True)

        assert_exact(scales(np.float32(1.75)), (np.float32(jnp.finfo(largest).max) / np.float32(1.75),) * 2)
    for power_of_two in (True, False):  # constants to autodiff
        assert_exact(jax.grad(CurrentScaling(power_of_two=power_of_two).scale)(jnp.float32(3.0)), 0.0)


# Powers of two


amaxes_32 = st.lists(st.integers(1, 0x7F7FFFFF), min_size=32, max_size=32).map(
    lambda bits: np.array(bits, np.int32).view(np.float32)
)


@functools.cache
def _largest_power(fp8_max, margin):
    return jax.jit(functools.partial(scale_from_amax, fp8_max=fp8_max, margin=margin, fallback=0.0))


@given(amax=amaxes_32, fp8_max=st.sampled_from(list(FP8_MAX.values())), margin=st.sampled_from([0, 1, -3, 100, -100]))
def test_the_largest_power_of_two_that_fits(amax, fp8_max, margin):
    scale = np.asarray(_largest_power(fp8_max, margin)(amax))
    assert scale.dtype == np.float32
    assert np.all(scale.view(np.int32) & 0x7FFFFF == 0)
    limit = fp8_max * 2.0**-margin
    reached = scale.astype(np.float64) * amax  # exact
    assert np.all((reached <= limit) | (scale == np.float32(2.0**-126)))
    assert np.all((2 * reached > limit) | (scale == np.float32(2.0**127)))


def test_golden_edges():
    kept = 3.0
    power = np.array([kept] * 2 + [2.0**127] * 4 + [256.0, 1.0, 2.0**-120] + [kept] * 5, np.float32)
    exact = [FLOAT32.max] * 4 + [448.0, 1.0, np.float32(448.0) / FLOAT32.max]
    exact = np.array([kept] * 2 + exact + [kept] * 5, np.float32)
    for power_of_two, expected in ((True, power), (False, exact)):
        formula = functools.partial(scale_from_amax, fp8_max=448.0, fallback=kept, power_of_two=power_of_two)
        assert_exact(jax.jit(formula)(EDGES), expected)


# The cast that a scale is made for: torch saturates and JAX alone does not, so that clipping is part of it


@pytest.mark.parametrize("dtype", ["e4m3fn", "e5m2"])
@pytest.mark.parametrize("source", ["f16", "bf16", "f32"])
def test_every_cast_saturates_and_rounds_as_the_hardware_does(source, dtype):
    target = {"e4m3fn": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}[dtype]
    if source == "f32":
        x = CASTS[f"probe_f32_{dtype}"]
    else:
        x = np.arange(2**16, dtype=np.uint16).view({"f16": np.float16, "bf16": jnp.bfloat16}[source])
    q = np.asarray(jax.jit(lambda x: saturating_cast(x, target))(x))
    expected = CASTS[f"saturate_{source}_{dtype}"]
    nan = np.isnan(x.astype(np.float32))
    assert q.dtype == target
    assert np.array_equal(np.isnan(q.astype(np.float32)), nan)
    np.testing.assert_array_equal(q.view(np.uint8)[~nan], expected[~nan])
    decoded = CASTS[f"decode_{dtype}"][q.view(np.uint8)]
    assert_exact(q.astype(np.float32), decoded)


# Bad input


@pytest.mark.parametrize(
    "kwargs, message",
    [
        ({"fp8_format": "e4m3"}, 'fp8_format must be "HYBRID" or "E4M3"; got \'e4m3\''),
        ({"amax_epsilon": -1.0}, "amax_epsilon must be finite and >= 0; 0 is no bound; got -1.0"),
        ({"amax_epsilon": float("nan")}, "amax_epsilon must be finite and >= 0; 0 is no bound; got nan"),
        ({"amax_history_len": 0}, "amax_history_len must be a whole number >= 1; got 0. .* CurrentScaling"),
        ({"amax_history_len": 1.5}, "amax_history_len must be a whole number >= 1; got 1.5"),
        ({"margin": 101}, "margin counts binades: a whole number from -100 to 100; got 101"),
        ({"amax_compute": "mean"}, 'amax_compute must be "max", "most_recent" or a function .*; got \'mean\''),
        ({"semantics": "flax"}, 'semantics must be "jaxmp" or "te" .*; got \'flax\''),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else "",
)
def test_a_bad_argument_is_named(kwargs, message):
    recipes = [recipe for recipe in (DelayedScaling, CurrentScaling) if kwargs.keys() <= vars(recipe()).keys()]
    assert recipes
    for recipe in recipes:
        with pytest.raises(ValueError, match=message):
            recipe(**kwargs)


def test_an_interval_is_accepted_and_said_to_do_nothing():
    with pytest.warns(UserWarning, match="interval=4 does nothing") as warned:
        recipe = DelayedScaling(interval=4, amax_history_len=1)
    assert warned[0].filename == __file__
    assert_exact(recipe.update(recipe.init(), jnp.float32(448.0)).scale, 1.0)
    DelayedScaling(interval=1)


def test_shapes_that_do_not_agree_are_named():
    recipe = DelayedScaling(amax_history_len=2)
    for shape, amax in (((2,), (3,)), ((), (1,)), ((2,), ())):
        with pytest.raises(ValueError, match=r"amaxes of each scale must be in the history.*init\(shape\)"):
            recipe.update(recipe.init(shape), jnp.ones(amax))
    with pytest.raises(ValueError, match="amax_history_len=2 amaxes of each scale must be.*got .*history \\(3,\\)"):
        recipe.update(DelayedScaling(amax_history_len=3).init(), jnp.float32(1.0))


def test_recipes_are_static_arguments():
    assert hash(DelayedScaling(margin=1)) == hash(DelayedScaling(margin=1))
    assert DelayedScaling(margin=1) != DelayedScaling()
    scale = jax.jit(lambda recipe, amax: recipe.scale(amax), static_argnums=0)
    assert_exact(scale(CurrentScaling(), jnp.float32(448.0)), 1.0)

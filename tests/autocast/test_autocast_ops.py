"""Operation by operation: the dtype that `jaxmp.autocast` gives against the one recorded from `torch.autocast`.

Nothing is computed: jax only traces. `COUNTERPARTS` has the JAX of each recorded expression of torch, as a user would
write it. Where JAX gives another dtype, `DEVIATIONS` says which one and why; a deviation that no longer deviates fails.
"""

import operator
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax.linen.dtypes import promote_dtype
from jax import lax

import jaxmp
import oracle_data

OPS = {op["name"]: op for op in oracle_data.load("torch_autocast")["ops"]}
FLOATS = {"f16": jnp.float16, "bf16": jnp.bfloat16, "f32": jnp.float32, "f64": jnp.float64}
DTYPES = {**FLOATS, "i64": jnp.int32, "bool": jnp.bool_}
NAMES = {jnp.dtype(dtype): name for name, dtype in DTYPES.items()} | {jnp.dtype("int64"): "i64"}


def layer(module, x, **params):
    return module.apply({"params": {key: p for key, p in params.items() if p is not None}}, x)


def conv(a, b, groups=1):
    a, b = promote_dtype(a, b)  # lax wants one dtype
    return lax.conv_general_dilated(a, b, (1,) * (a.ndim - 2), "VALID", feature_group_count=groups)


def conv_transpose(a, b):
    a, b = promote_dtype(a, b)
    return lax.conv_transpose(a, b, (1, 1), "VALID", dimension_numbers=("NCHW", "IOHW", "NCHW"))


def lstm_cell(x, h, c, w, u):
    i, f, g, o = jnp.split(x @ w.T + h @ u.T, 4, -1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return jax.nn.sigmoid(o) * jnp.tanh(c), c


def gru_cell(x, h, w, u):
    (r, z, n), (rh, zh, nh) = jnp.split(x @ w.T, 3, -1), jnp.split(h @ u.T, 3, -1)
    n = jnp.tanh(n + jax.nn.sigmoid(r + rh) * nh)
    z = jax.nn.sigmoid(z + zh)
    return (1 - z) * n + z * h


def normalized(a, axes, mean=None, var=None):
    mean = a.mean(axes, keepdims=True) if mean is None else mean
    var = a.var(axes, keepdims=True) if var is None else var
    return (a - mean) * lax.rsqrt(var + 1e-5)


def batch_norm(a, scale, bias, mean=None, var=None):
    scale, bias, mean, var = (x if x is None else x[None, :, None, None] for x in (scale, bias, mean, var))
    return normalized(a, (0, 2, 3), mean, var) * scale + bias


def index_put(a, b, i):
    a, b = promote_dtype(a, b)  # jax warns of updates that are wider
    return a.at[i].set(b)


def scatter_add(a, b, i):
    a, b = promote_dtype(a, b)
    return a.at[i, jnp.arange(8)[None]].add(b)


JNP = """acos asin atan cos cosh sin sinh tan tanh exp exp2 expm1 log log10 log2 log1p reciprocal sqrt square abs sign
    floor round isfinite isnan dot vdot outer maximum atan2 hypot cross sort tril sum mean prod var std max argmax
    cumsum cumprod""".split()
NN = "sigmoid relu silu softplus elu selu leaky_relu mish glu logsumexp softmax log_softmax".split()

COUNTERPARTS = {
    **{name: getattr(lax, name) for name in ("erf", "erfc", "rsqrt")},
    **{name: getattr(jnp, name) for name in JNP},
    **{name: getattr(jax.nn, name) for name in NN},
    **dict.fromkeys(("matmul_batched", "bmm", "mv"), jnp.matmul),
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), conv),
    **dict.fromkeys(("smooth_l1_loss", "huber_loss"), lambda a, b: optax.huber_loss(a, b).mean()),
    **{name: getattr(operator, name) for name in ("neg", "add", "sub", "mul", "matmul")},
    **{f"pow_{n}": lambda a, n=n: a**n for n in (2, 3, 2.5, 0.5, -1)},
    "erfinv": lax.erf_inv,
    "linear": lambda a, b: a @ b.T,
    "linear_bias": lambda a, b, c: layer(nn.Dense(8), a, kernel=b, bias=c),
    "addmm": lambda a, b, c: c + a @ b,
    "einsum": lambda a, b: jnp.einsum("bi,ij->bj", a, b),
    "einsum_batched": lambda a, b: jnp.einsum("bhqd,bhkd->bhqk", a, b),
    "linalg_vecdot": jnp.linalg.vecdot,
    "tensordot": lambda a, b: jnp.tensordot(a, b, 1),
    "addr": lambda a, b, c: c + jnp.outer(a, b),
    "conv2d_grouped": lambda a, b: conv(a, b, 3),
    "conv_transpose2d": conv_transpose,
    "scaled_dot_product_attention": lambda a, b, c: jax.nn.dot_product_attention(*promote_dtype(a, b, c)),
    "lstm_cell": lstm_cell,
    "gru_cell": gru_cell,
    "prelu": lambda a, b: jnp.where(a >= 0, a, b[None] * a),
    "scalar_to_the_power": lambda a: 2.0**a,
    "pow_tensor": lambda a, b: a**b,
    "one_over": lambda a: 1 / a,
    "sum_dim": lambda a: a.sum(-1),
    "mean_dim": lambda a: a.mean(-1),
    "logcumsumexp": lambda a: lax.cumlogsumexp(a, 1),
    "softmax_dtype": lambda a: jax.nn.softmax(a).astype(jnp.float16),
    "sum_dtype": lambda a: a.sum(-1, dtype=jnp.float16),
    "norm": lambda a: jnp.linalg.norm(a, axis=-1),
    "norm_1": lambda a: jnp.linalg.norm(a, 1, axis=-1),
    "matrix_norm": jnp.linalg.norm,
    "any_positive": lambda a: (a > 0).any(-1),
    "topk": lambda a: lax.top_k(a, 2)[0],
    "layer_norm": lambda a, b, c: layer(nn.LayerNorm(), a, scale=b, bias=c),
    "rms_norm": lambda a, b: layer(nn.RMSNorm(), a, scale=b),
    "group_norm": lambda a, b, c: layer(nn.GroupNorm(2), jnp.moveaxis(a, 1, -1), scale=b, bias=c),
    "instance_norm": lambda a: normalized(a, (2, 3)),
    "batch_norm_train": batch_norm,
    "batch_norm_eval": lambda a, mean, var, scale, bias: batch_norm(a, scale, bias, mean, var),
    "cosine_similarity": optax.cosine_similarity,
    "normalize": lambda a: a / jnp.linalg.norm(a, axis=1, keepdims=True),
    "cross_entropy": lambda a, i: optax.softmax_cross_entropy_with_integer_labels(a, i).mean(),
    "nll_loss": lambda a, i: -jnp.take_along_axis(a, i[:, None], -1).mean(),
    "mse_loss": lambda a, b: optax.squared_error(a, b).mean(),
    "l1_loss": lambda a, b: jnp.abs(a - b).mean(),
    "kl_div": lambda a, b: optax.kl_divergence(a, b).mean(),
    "binary_cross_entropy_with_logits": lambda a, b: optax.sigmoid_binary_cross_entropy(a, b).mean(),
    "binary_cross_entropy": lambda a, b: -(b * jnp.log(a) + (1 - b) * jnp.log1p(-a)).mean(),
    "hinge_embedding_loss": lambda a, b: jnp.where(b > 0, a, jax.nn.relu(1 - a)).mean(),
    "gelu": lambda a: jax.nn.gelu(a, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "logsigmoid": jax.nn.log_sigmoid,
    "hardtanh": jax.nn.hard_tanh,
    "dropout": lambda a: nn.Dropout(0.5, deterministic=False).apply({}, a, rngs={"dropout": jax.random.key(0)}),
    "div": lambda a, b: a / b,
    "remainder": lambda a, b: a % b,
    "greater": lambda a, b: a > b,
    "addcmul": lambda a, b, c: a + b * c,
    "addcdiv": lambda a, b, c: a + b / c,
    "lerp": lambda a, b: a + 0.5 * (b - a),
    "cat": lambda a, b: jnp.concatenate([a, b]),
    "stack": lambda a, b: jnp.stack([a, b]),
    "where": lambda a, b, m: jnp.where(m, a, b),
    "masked_fill": lambda a, m: jnp.where(m, -1e4, a),
    "clamp": lambda a: jnp.clip(a, -1, 1),
    "scalar_tensor_mul": lambda a, b: a * b,
    "python_scalar_mul": lambda a: a * 2.0,
    "python_scalar_add": lambda a: a + 1,
    "int_tensor_mul": lambda a, i: a * i,
    "embedding": lambda a, i: nn.Embed(8, 8).apply({"params": {"embedding": a}}, i),
    "gather": lambda a, i: jnp.take_along_axis(a, i, 1),
    "index_select": lambda a, i: a[i],
    "index_put": index_put,
    "scatter_add": scatter_add,
    "one_hot": lambda i: jax.nn.one_hot(i, 4, dtype=int),
    "cdist": lambda a, b: jnp.sqrt(((a[:, None] - b[None]) ** 2).sum(-1)),
    "reshape": lambda a: a.reshape(8, 4),
    "transpose": lambda a: a.mT,
    "pad": lambda a: jnp.pad(a, ((0, 0), (1, 1))),
    "roll": lambda a: jnp.roll(a, 1),
    "max_pool2d": lambda a: nn.max_pool(jnp.moveaxis(a, 1, -1), (2, 2), (2, 2)),
    "avg_pool2d": lambda a: nn.avg_pool(jnp.moveaxis(a, 1, -1), (2, 2), (2, 2)),
    "interpolate_nearest": lambda a: jax.image.resize(a, (2, 3, 16, 16), "nearest"),
    "interpolate_bilinear": lambda a: jax.image.resize(a, (2, 3, 16, 16), "bilinear"),
}

IN_PARTS = "its parts, of which some are float32 operations"
NOT_A_BIAS = "a product and a sum with a float32 array of the same size: the widest dtype; torch's is one operation"
WRITTEN_OUT = "written out, it is arithmetic on what it is given; torch's is one operation that casts"
IS_MATMUL = "a product of tensors is the same primitive as a matmul"
A_SUM = "a product without a matrix is a sum, and sums are float32"
RESIZE = "jax resizes by indexing"
OF_FOUR = "a product that sums four elements, here over keys, is no layer"
ASKED_FOR = "the cast to the dtype of the result is the one that the sum undoes"
A_MEAN = "a sum, in float32, and a division"
A_BUFFER = "a write into a buffer keeps its dtype, so that loops can carry it"
INTEGERS = "jax makes the integers a float32 array"
F64_WINS = "jax promotes the other arguments to float64 itself"


def is_float32(*dtypes):
    return "f64" if "f64" in dtypes else "f32"


def is_16_bits(*dtypes):
    return "f64" if "f64" in dtypes else "lp"


def is_widest(*dtypes):
    return dtypes[0] if len({*dtypes}) == 1 else is_float32(*dtypes)


def is_16_bits_of_16_bits(*dtypes):
    return "lp" if {*dtypes} == {"lp"} else is_float32(*dtypes)


# Where JAX's dtype is not torch's: a reason, and the dtype here by the dtypes of the arguments, as a rule or by rows.
# "lp" is the dtype of autocast, "other" the other 16-bit one.
DEVIATIONS: dict[str, tuple[str, Callable[..., str] | dict[str, str]]] = {
    **dict.fromkeys(("exp2", "mish", "logcumsumexp", "instance_norm", "hypot"), (IN_PARTS, is_float32)),
    **dict.fromkeys(("batch_norm_train", "batch_norm_eval"), (IN_PARTS, is_float32)),
    **dict.fromkeys(("dot", "vdot", "linalg_vecdot"), (A_SUM, is_float32)),
    **dict.fromkeys(("mean", "mean_dim", "var", "std"), (A_MEAN, is_float32)),
    **dict.fromkeys(("addr", "prelu", "cross"), (WRITTEN_OUT, is_widest)),
    **dict.fromkeys(("lstm_cell", "gru_cell"), (WRITTEN_OUT, is_16_bits_of_16_bits)),
    **dict.fromkeys(("binary_cross_entropy_with_logits", "scalar_tensor_mul"), (F64_WINS, {"f64 lp": "f64"})),
    "addmm": (NOT_A_BIAS, dict.fromkeys(("f32 f32 f32", "lp f32 f32", "other other other"), "f32")),
    "tensordot": (IS_MATMUL, is_16_bits),
    "scaled_dot_product_attention": (OF_FOUR, is_float32),
    "sum_dtype": (ASKED_FOR, lambda dtype: "f32"),
    "index_put": (A_BUFFER, lambda buffer, updates: buffer),
    "interpolate_nearest": (RESIZE, is_widest),
    "int_tensor_mul": (INTEGERS, is_float32),
}


def arguments(op, row):
    """Floating arguments in order, then indices and masks: as COUNTERPARTS takes them."""
    floats, others = [], []
    dtypes = iter(row.split())
    for shape in op["shapes"]:
        if shape and shape[0] in ("i", "m"):
            others.append(jax.ShapeDtypeStruct(tuple(shape[1]), {"i": jnp.int32, "m": jnp.bool_}[shape[0]]))
        else:
            floats.append(jax.ShapeDtypeStruct(tuple(shape), DTYPES[next(dtypes)]))
    return floats + others


def halved(x):
    """`x` as a product leaves it: float32 to the function that is traced, and of 16 bits under autocast."""
    return (jnp.stack([x] * 8, -1) @ jnp.ones((8, 1)))[..., 0]


def dtype_under_autocast(name, lp, row, where):
    """`at the border`: the arguments have these dtypes. `inside`: they are float32, and products make them 16 bits."""
    fn, arrays = COUNTERPARTS[name], arguments(OPS[name], row)
    half = [where == "inside" and x.dtype == DTYPES[lp] for x in arrays]
    if where == "inside":
        arrays = arguments(OPS[name], " ".join("f32" for _ in row.split()))
    run = jaxmp.autocast(lambda *xs: fn(*(halved(x) if h else x for x, h in zip(xs, half, strict=True))), DTYPES[lp])
    with jax.enable_x64("f64" in row):
        return " ".join(NAMES[x.dtype] for x in jax.tree.leaves(jax.eval_shape(run, *arrays)))


def by_role(row, lp):
    (other,) = {"f16", "bf16"} - {lp}
    return " ".join({lp: "lp", other: "other"}.get(dtype, dtype) for dtype in row.split())


def expected(name, lp, row):
    """Torch's dtypes and those here, by role. Where torch refuses a mixture of dtypes, JAX promotes it: None."""
    torchs, role = by_role(OPS[name]["cases"][lp][row], lp), by_role(row, lp)
    _, rule = DEVIATIONS.get(name, ("", {}))
    dtype = rule.get(role) if isinstance(rule, dict) else rule(*role.split())
    here = " ".join([dtype] * len(torchs.split())) if dtype else torchs
    return (torchs, here) if not torchs.startswith("error") else (None, None)


def test_every_recorded_operation_has_a_counterpart():
    assert COUNTERPARTS.keys() == OPS.keys() >= DEVIATIONS.keys()


@pytest.mark.thorough(30)
@pytest.mark.parametrize("where", ["inside", "at the border"])
@pytest.mark.parametrize("name", COUNTERPARTS)
def test_the_dtype_is_torchs(name, where):
    wrong = {}
    for lp, row in [(lp, row) for lp, rows in OPS[name]["cases"].items() for row in rows]:
        role = by_role(row, lp)
        if where == "inside" and (lp != "f16" or not {*role.split()} <= {"lp", "f32"}):
            continue  # what products make; bf16 is another name for the same there
        got, (_, want) = by_role(dtype_under_autocast(name, lp, row, where), lp), expected(name, lp, row)
        if want not in (got, None):
            wrong[f"{lp}: {role}"] = f"{got}, expected {want}"
    assert not wrong


@pytest.mark.parametrize("name", DEVIATIONS)
def test_no_deviation_is_out_of_date(name):
    """Some of its rows are not what torch gives; all, where rows are listed."""
    (reason, rule), cases = DEVIATIONS[name], OPS[name]["cases"]
    pairs = {by_role(row, lp): expected(name, lp, row) for lp, rows in cases.items() for row in rows}
    differ = {role for role, (torchs, here) in pairs.items() if torchs != here}
    assert reason and differ and (callable(rule) or differ == rule.keys())

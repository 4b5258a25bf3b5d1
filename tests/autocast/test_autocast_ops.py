"""Operation by operation: the dtype that `jaxmp.autocast` gives against the one recorded from `torch.autocast`.

Nothing is computed: jax only traces. `COUNTERPARTS` has the JAX of each recorded expression of torch, as a user would
write it. Where JAX gives another dtype, `DEVIATIONS` says which one and why; a deviation that no longer deviates fails.
"""

from typing import Any

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
DTYPES = {
    "f16": jnp.float16,
    "bf16": jnp.bfloat16,
    "f32": jnp.float32,
    "f64": jnp.float64,
    "i64": jnp.int32,
    "bool": jnp.bool_,
}
NAMES = {jnp.dtype(dtype): name for name, dtype in DTYPES.items()} | {jnp.dtype("int64"): "i64"}


def layer(module: nn.Module, x: Any, **params: Any) -> Any:
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


def per_channel(x):
    return x[None, :, None, None]


def pooled(a):
    return nn.avg_pool(jnp.moveaxis(a, 1, -1), (2, 2), (2, 2))


def huber(a, b):
    return optax.huber_loss(a, b).mean()


def picked(a, i):
    return jnp.take_along_axis(a, i[:, None], -1)


def index_put(a, b, i):
    a, b = promote_dtype(a, b)  # jax warns of updates that are wider
    return a.at[i].set(b)


def scatter_add(a, b, i):
    a, b = promote_dtype(a, b)
    return a.at[i, jnp.arange(8)[None]].add(b)


def resized(a, method):
    return jax.image.resize(a, (2, 3, 16, 16), method)


LAX = {name: getattr(lax, name) for name in ("erfc", "rsqrt")} | {"erfinv": lax.erf_inv, "erf": lax.erf}
JNP = """acos asin atan cos cosh sin sinh tan tanh exp exp2 expm1 log log10 log2 log1p reciprocal sqrt square abs
    sign floor round isfinite isnan""".split()
NN = "sigmoid relu silu softplus elu selu leaky_relu mish glu logsumexp".split()

COUNTERPARTS = {
    **LAX,
    **{name: getattr(jnp, name) for name in JNP},
    **{name: getattr(jax.nn, name) for name in NN},
    "neg": lambda a: -a,
    "linear": lambda a, b: a @ b.T,
    "linear_bias": lambda a, b, c: layer(nn.Dense(8), a, kernel=b, bias=c),
    "matmul": lambda a, b: a @ b,
    "matmul_batched": lambda a, b: a @ b,
    "bmm": lambda a, b: a @ b,
    "mv": lambda a, b: a @ b,
    "addmm": lambda a, b, c: c + a @ b,
    "einsum": lambda a, b: jnp.einsum("bi,ij->bj", a, b),
    "einsum_batched": lambda a, b: jnp.einsum("bhqd,bhkd->bhqk", a, b),
    "dot": jnp.dot,
    "vdot": jnp.vdot,
    "linalg_vecdot": jnp.linalg.vecdot,
    "tensordot": lambda a, b: jnp.tensordot(a, b, 1),
    "outer": jnp.outer,
    "addr": lambda a, b, c: c + jnp.outer(a, b),
    "conv1d": conv,
    "conv2d": conv,
    "conv3d": conv,
    "conv2d_grouped": lambda a, b: conv(a, b, 3),
    "conv_transpose2d": conv_transpose,
    "scaled_dot_product_attention": lambda a, b, c: jax.nn.dot_product_attention(*promote_dtype(a, b, c)),
    "lstm_cell": lstm_cell,
    "gru_cell": gru_cell,
    "prelu": lambda a, b: jnp.where(a >= 0, a, b[None] * a),
    "pow_2": lambda a: a**2,
    "pow_3": lambda a: a**3,
    "pow_2.5": lambda a: a**2.5,
    "pow_0.5": lambda a: a**0.5,
    "pow_-1": lambda a: a**-1,
    "scalar_to_the_power": lambda a: 2.0**a,
    "pow_tensor": lambda a, b: a**b,
    "one_over": lambda a: 1 / a,
    "sum": lambda a: a.sum(),
    "sum_dim": lambda a: a.sum(-1),
    "mean": lambda a: a.mean(),
    "mean_dim": lambda a: a.mean(-1),
    "prod": lambda a: a.prod(),
    "cumsum": lambda a: a.cumsum(-1),
    "cumprod": lambda a: a.cumprod(-1),
    "logcumsumexp": lambda a: lax.cumlogsumexp(a, 1),
    "softmax": jax.nn.softmax,
    "log_softmax": jax.nn.log_softmax,
    "softmax_dtype": lambda a: jax.nn.softmax(a).astype(jnp.float16),
    "sum_dtype": lambda a: a.sum(-1, dtype=jnp.float16),
    "var": lambda a: a.var(-1),
    "std": lambda a: a.std(-1),
    "norm": lambda a: jnp.linalg.norm(a, axis=-1),
    "norm_1": lambda a: jnp.linalg.norm(a, 1, axis=-1),
    "matrix_norm": jnp.linalg.norm,
    "max": lambda a: a.max(-1),
    "argmax": lambda a: a.argmax(-1),
    "any_positive": lambda a: (a > 0).any(-1),
    "topk": lambda a: lax.top_k(a, 2)[0],
    "sort": jnp.sort,
    "layer_norm": lambda a, b, c: layer(nn.LayerNorm(), a, scale=b, bias=c),
    "rms_norm": lambda a, b: layer(nn.RMSNorm(), a, scale=b),
    "group_norm": lambda a, b, c: layer(nn.GroupNorm(2), jnp.moveaxis(a, 1, -1), scale=b, bias=c),
    "instance_norm": lambda a: normalized(a, (2, 3)),
    "batch_norm_train": lambda a, b, c: normalized(a, (0, 2, 3)) * per_channel(b) + per_channel(c),
    "batch_norm_eval": lambda a, b, c, d, e: (
        normalized(a, None, per_channel(b), per_channel(c)) * per_channel(d) + per_channel(e)
    ),
    "cosine_similarity": optax.cosine_similarity,
    "normalize": lambda a: a / jnp.linalg.norm(a, axis=1, keepdims=True),
    "cross_entropy": lambda a, i: optax.softmax_cross_entropy_with_integer_labels(a, i).mean(),
    "nll_loss": lambda a, i: -picked(a, i).mean(),
    "mse_loss": lambda a, b: optax.squared_error(a, b).mean(),
    "l1_loss": lambda a, b: jnp.abs(a - b).mean(),
    "smooth_l1_loss": huber,
    "huber_loss": huber,
    "kl_div": lambda a, b: optax.kl_divergence(a, b).mean(),
    "binary_cross_entropy_with_logits": lambda a, b: optax.sigmoid_binary_cross_entropy(a, b).mean(),
    "binary_cross_entropy": lambda a, b: -(b * jnp.log(a) + (1 - b) * jnp.log1p(-a)).mean(),
    "hinge_embedding_loss": lambda a, b: jnp.where(b > 0, a, jax.nn.relu(1 - a)).mean(),
    "gelu": lambda a: jax.nn.gelu(a, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "logsigmoid": jax.nn.log_sigmoid,
    "hardtanh": jax.nn.hard_tanh,
    "dropout": lambda a: nn.Dropout(0.5, deterministic=False).apply({}, a, rngs={"dropout": jax.random.key(0)}),
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b,
    "remainder": lambda a, b: a % b,
    "maximum": jnp.maximum,
    "greater": lambda a, b: a > b,
    "atan2": jnp.atan2,
    "hypot": jnp.hypot,
    "cross": jnp.cross,
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
    "avg_pool2d": pooled,
    "interpolate_nearest": lambda a: resized(a, "nearest"),
    "interpolate_bilinear": lambda a: resized(a, "bilinear"),
    "tril": jnp.tril,
}

# Where JAX's dtype is not torch's: a reason, and by the dtypes of the arguments the dtype here. "lp" is the dtype of
# autocast, "other" the other 16-bit one; "f16: lp" is "lp" where autocast is to f16.
Deviations = dict[str, tuple[str, dict[str, str]]]

PARTS_IN_F32 = "its parts, of which some are float32 operations"
NOT_A_BIAS = "a product and a sum with a float32 array of the same size: the widest dtype; torch's is one operation"
WRITTEN_OUT = "written out, it is arithmetic on what it is given; torch's is one operation that casts"
IS_MATMUL = "a product of tensors is the same primitive as a matmul"
A_SUM = "a product without a matrix is a sum, and sums are float32"
RESIZE = "jax resizes by indexing"
OF_FOUR = "a product that sums four elements, here over keys, is no layer"
ASKED_FOR = "the cast to the dtype of the result is the one that the sum undoes"
A_MEAN = "a sum, in float32, and a division"
A_BUFFER = "a write into a buffer keeps its dtype, so that loops can carry it"


def all_of(n: int, lp: str, other: str) -> dict[str, str]:
    return {" ".join(["lp"] * n): lp, " ".join(["other"] * n): other}


def rows_of(out: str, *rows: str) -> dict[str, str]:
    return dict.fromkeys(rows, out)


EVERYWHERE: Deviations = {
    **dict.fromkeys(("exp2", "mish", "logcumsumexp", "instance_norm"), (PARTS_IN_F32, all_of(1, "f32", "f32"))),
    "hypot": (PARTS_IN_F32, all_of(2, "f32", "f32")),
    "batch_norm_train": (PARTS_IN_F32, all_of(3, "f32", "f32") | rows_of("f32", "lp f32 f32", "other lp lp")),
    "batch_norm_eval": (
        PARTS_IN_F32,
        all_of(5, "f32", "f32") | rows_of("f32", "lp f32 f32 f32 f32", "other lp lp lp lp"),
    ),
    "addmm": (NOT_A_BIAS, rows_of("f32", "f32 f32 f32", "lp f32 f32")),
    **dict.fromkeys(("dot", "vdot"), (A_SUM, all_of(2, "f32", "f32"))),
    "linalg_vecdot": (A_SUM, all_of(2, "f32", "f32") | rows_of("f32", "f32 f32", "lp f32", "f32 lp", "other lp")),
    "tensordot": (IS_MATMUL, rows_of("lp", "f32 f32", "lp f32", "f32 lp")),
    "addr": (
        WRITTEN_OUT,
        rows_of("f32", "f32 f32 f32", "lp f32 f32", "f32 lp lp", "other lp lp") | {"other other other": "other"},
    ),
    "prelu": (WRITTEN_OUT, rows_of("f32", "f32 f32", "lp f32", "f32 lp", "other lp") | {"other other": "other"}),
    "cross": (WRITTEN_OUT, rows_of("f32", "lp f32", "other lp")),
    "scaled_dot_product_attention": (
        OF_FOUR,
        all_of(3, "f32", "f32") | rows_of("f32", "f32 f32 f32", "lp f32 f32", "f32 lp lp", "other lp lp"),
    ),
    "lstm_cell": (WRITTEN_OUT, rows_of("f32 f32", "f32 f32 f32 f32 f32", "lp f32 f32 f32 f32", "f32 lp lp lp lp")),
    "gru_cell": (WRITTEN_OUT, rows_of("f32", "f32 f32 f32 f32", "lp f32 f32 f32", "f32 lp lp lp")),
    "sum_dtype": (ASKED_FOR, rows_of("f32", "lp", "f32", "other", "f64")),
    "index_put": (A_BUFFER, rows_of("lp", "lp f32")),
    "interpolate_nearest": (RESIZE, all_of(1, "lp", "other")),
}
INTEGERS = "jax makes the integers a float32 array"
F64_WINS = "jax promotes the other arguments to float64 itself"
INSIDE: Deviations = {
    **dict.fromkeys(("mean", "mean_dim", "var", "std"), (A_MEAN, {"lp": "f32"})),
    "int_tensor_mul": (INTEGERS, {"lp": "f32"}),
}
AT_THE_BORDER: Deviations = {
    **dict.fromkeys(("mean", "mean_dim", "var", "std"), (A_MEAN, all_of(1, "f32", "f32"))),
    "int_tensor_mul": (INTEGERS, all_of(1, "f32", "f32")),
    "addmm": (NOT_A_BIAS, rows_of("f32", "f32 f32 f32", "lp f32 f32", "other other other")),
    "binary_cross_entropy_with_logits": (F64_WINS, {"f64 lp": "f64"}),
    "scalar_tensor_mul": (F64_WINS, {"f64 lp": "f64"}),
    "lstm_cell": (
        WRITTEN_OUT,
        rows_of(
            "f32 f32",
            *("f32 f32 f32 f32 f32", "other other other other other", "lp f32 f32 f32 f32"),
            *("f32 lp lp lp lp", "other lp lp lp lp"),
        )
        | {"f64 lp lp lp lp": "f64 f64"},
    ),
    "gru_cell": (
        WRITTEN_OUT,
        rows_of("f32", "f32 f32 f32 f32", "other other other other", "lp f32 f32 f32", "f32 lp lp lp", "other lp lp lp")
        | {"f64 lp lp lp": "f64"},
    ),
}
DEVIATIONS = {"inside": EVERYWHERE | INSIDE, "at the border": EVERYWHERE | AT_THE_BORDER}


def arguments(op: dict[str, Any], row: str) -> list[jax.ShapeDtypeStruct]:
    """Floating arguments in order, then indices and masks: as COUNTERPARTS takes them."""
    floats, others = [], []
    dtypes = iter(row.split())
    for shape in op["shapes"]:
        if shape and shape[0] in ("i", "m"):
            others.append(jax.ShapeDtypeStruct(tuple(shape[1]), {"i": jnp.int32, "m": jnp.bool_}[shape[0]]))
        else:
            floats.append(jax.ShapeDtypeStruct(tuple(shape), DTYPES[next(dtypes)]))
    return floats + others


def halved(x: Any) -> Any:
    """`x` as a product leaves it: float32 to the function that is traced, and of 16 bits under autocast."""
    return (jnp.stack([x] * 8, -1) @ jnp.ones((8, 1)))[..., 0]


def dtype_under_autocast(name: str, lp: str, row: str, where: str) -> str:
    """`at the border`: the arguments have these dtypes. `inside`: they are float32, and products make them 16 bits."""
    fn, arrays = COUNTERPARTS[name], arguments(OPS[name], row)
    if where == "inside":
        half = [x.dtype == DTYPES[lp] for x in arrays]
        arrays = arguments(OPS[name], " ".join("f32" for _ in row.split()))

        def traced(*xs):
            return COUNTERPARTS[name](*(halved(x) if h else x for x, h in zip(xs, half, strict=True)))

        fn = traced
    with jax.enable_x64("f64" in row):
        out = jax.eval_shape(jaxmp.autocast(fn, DTYPES[lp]), *arrays)
    return " ".join(NAMES[x.dtype] for x in jax.tree.leaves(out))


def by_role(row: str, lp: str) -> str:
    (other,) = {"f16", "bf16"} - {lp}
    return " ".join({lp: "lp", other: "other"}.get(dtype, dtype) for dtype in row.split())


def expected(name: str, lp: str, row: str, where: str) -> str:
    """By role; torch's own dtype or error, unless a deviation is listed."""
    recorded = OPS[name]["cases"][lp][row]
    if recorded.startswith("error"):
        return recorded
    _, rows = DEVIATIONS[where].get(name, ("", {}))
    role = by_role(row, lp)
    return rows.get(f"{lp}: {role}", rows.get(role, by_role(recorded, lp)))


def test_every_recorded_operation_has_a_counterpart():
    assert COUNTERPARTS.keys() == OPS.keys()
    assert all(names.keys() <= OPS.keys() for names in DEVIATIONS.values())


@pytest.mark.thorough(50)
@pytest.mark.parametrize("where", DEVIATIONS)
@pytest.mark.parametrize("name", COUNTERPARTS)
def test_the_dtype_is_torchs(name, where):
    """Where torch refuses a mixture of dtypes, JAX promotes it: only that it does not fail is asked there."""
    wrong = {}
    for lp, rows in OPS[name]["cases"].items():
        for row in rows:
            role = by_role(row, lp)
            if where == "inside" and (lp != "f16" or not {*role.split()} <= {"lp", "f32"}):
                continue  # what products make; bf16 is another name for the same there
            got, want = by_role(dtype_under_autocast(name, lp, row, where), lp), expected(name, lp, row, where)
            if got != want and not want.startswith("error"):
                wrong[f"{lp}: {role}"] = f"{got}, expected {want}"
    assert not wrong


def test_no_deviation_is_out_of_date():
    """Each of them differs from what torch gives."""
    for names in DEVIATIONS.values():
        for name, (reason, rows) in names.items():
            assert reason
            recorded = {}
            for lp, cases in OPS[name]["cases"].items():
                torchs = {by_role(row, lp): by_role(out, lp) for row, out in cases.items()}
                recorded |= torchs | {f"{lp}: {role}": out for role, out in torchs.items()}
            assert not [(name, row) for row, out in rows.items() if recorded[row] == out]

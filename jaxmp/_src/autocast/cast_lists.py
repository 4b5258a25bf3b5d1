"""Which dtype each operation runs in under autocast: torch.autocast's lists, for JAX's primitives.

An operation is a primitive of a jaxpr (`dot_general`, `exp`) or a function that the jaxpr calls by name (`elu`). There
are four groups:

    allow       float16 or bfloat16: tensor cores make these fast              matmuls, convolutions
    force_fp32  float32: where 16 bits lose range or precision                exp, log, pow, rsqrt, sums, erf_inv, ...
    widest      the widest dtype of its inputs: cheap, and safe in either     add, mul, max, tanh, reshape, ...;
                a write into a buffer keeps the buffer's dtype; a product that sums at most four elements is here, too
                (tensor cores gain nothing, and geometry is exact). A product without a matrix (`jnp.vdot`) is a sum
    (others)    the dtypes it was written with: no 16-bit form is known        fft, cholesky, pallas kernels, callbacks,
                a product with `precision=HIGHEST` or an algorithm

What adds up more than two numbers does so in float32, forwards and backwards. The result of a sum is float32; an
average over windows, a scatter and a short product are rounded once, to the dtype of their inputs.

PyTorch's lists name whole operations (softmax, layer_norm). A jaxpr shows only their parts. So the lists hold the
important parts, and `value_uses` combines them: operations that feed only float32 operations run in float32 too.

References:
  torch/csrc/autograd, ATen/autocast_mode.h (PyTorch 2.13), CUDA lists.
"""

import difflib
import math
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import primitives

from jaxmp._src.base import tree_paths
from jaxmp._src.numerics import formats
from jaxmp._src.programs import jaxprs

ALLOW = jaxprs.MATMULS | jaxprs.RAGGED_MATMULS

FORCE_FP32 = frozenset(
    {
        *("exp", "exp2", "expm1", "log", "log2", "log1p", "pow", "integer_pow", "square", "rsqrt", "erf_inv"),
        *("acos", "asin", "tan", "cosh", "sinh", "acosh", "atanh"),
        *("lgamma", "digamma", "polygamma", "zeta", "igamma", "igammac", "igamma_grad_a", "random_gamma_grad"),
        *("regularized_incomplete_beta", "bessel_i0e", "bessel_i1e"),
        *("reduce_sum", "reduce_prod", "reduce_window_sum", "cumsum", "cumprod", "cumlogsumexp"),
    }
)

# Arithmetic, and functions whose result in 16 bits is as precise as their input.
_ARITHMETIC = frozenset(
    {
        *("add", "sub", "mul", "div", "rem", "neg", "abs", "sign", "add_any", "sqrt", "cbrt"),
        *("one_minus_square", "tanh", "logistic", "sin", "cos", "atan", "atan2", "asinh", "erf", "erfc"),
        *("floor", "ceil", "round", "nextafter", "is_finite"),
        *("eq", "ne", "lt", "le", "gt", "ge", "eq_to", "lt_to", "le_to"),
        *("scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"),
        *("elu", "selu", "celu", "log_sigmoid"),
    }
)

# These move or pick values and compute nothing: a constant among the inputs is one value of many.
MOVES = frozenset(
    {
        *("select_n", "max", "min", "clamp", "pad", "concatenate", "stack", "dynamic_update_slice", "scatter"),
        *("broadcast_in_dim", "reshape", "squeeze", "transpose", "rev", "slice", "dynamic_slice", "gather", "tile"),
        *("split", "unstack", "copy", "copy_p", "stop_gradient", "reduce_max", "reduce_min", "cummax", "cummin"),
        *("argmax", "argmin", "reduce_window_max", "reduce_window_min", "sharding_constraint", "name", "top_k"),
    }
)

# These write into a buffer, their first input, and return it in its dtype: a cache stays as small as it was made.
INTO_BUFFER = frozenset({"dynamic_update_slice", "scatter"})

# Every input of these has a dtype of its own.
EACH_ITS_OWN = frozenset(
    {
        *("sort", "optimization_barrier", "psum", "psum_invariant", "psum_invariant2", "pmax", "pmin", "ppermute"),
        *("all_gather", "all_gather_invariant", "all_to_all", "reduce_scatter", "pvary", "pbroadcast", "pcast"),
        *("device_put", "reshard", "mesh_cast"),
    }
)

WIDEST = _ARITHMETIC | MOVES | EACH_ITS_OWN

# Arithmetic that may have float32 scalars. (The next number after one depends on the dtype.)
_WITH_SCALARS = _ARITHMETIC - {"nextafter"}

SHORT = 4  # elements
SCATTERED = frozenset({"scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"})
WINDOWS = frozenset({"reduce_window_max", "reduce_window_min"})

# Elementwise work, which costs nothing in any dtype if it is fused with the next operation.
FUSIBLE = (_ARITHMETIC | MOVES) - {
    *("scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max", "scatter", "gather", "sort"),
    *("reduce_window_max", "reduce_window_min", "dynamic_update_slice", "top_k"),
    *("sharding_constraint", "name", "cummax", "cummin", "argmax", "argmin", "dynamic_slice", "concatenate"),
}

# Movement of a part of a value: of a computed one in float32, if float32 operations read it. (A table of params stays
# as small as it is.)
PARTS = frozenset({"gather", "dynamic_slice", "concatenate"})

# Powers leave the range of 16 bits, and bounded functions return to it: 16 bits can hold the tanh of GELU.
POWERS = frozenset({"integer_pow", "square"})
BOUNDED = frozenset({"tanh", "logistic", "erf", "erfc", "sin", "cos", "sign"})

# A cast before these is a cast of the same or fewer values.
BEFORE_CAST = jaxprs.REARRANGES | {"broadcast_in_dim"}

# In the files of jax's linear algebra, these are products and norms; all others (expm, pinv, polar, ...) iterate or
# cancel, and a matmul inside them is no tensor-core work.
PRODUCTS = frozenset(
    {
        *("matmul", "multi_dot", "vecdot", "tensordot", "outer", "cross", "trace", "diagonal", "matrix_transpose"),
        *("norm", "vector_norm", "matrix_norm"),
    }
)
_JAX = pathlib.PurePath(jax.__file__).parent

LOW_MARK = "jaxmp.autocast.low"  # the name of results that are cast to 16 bits (see `flax_layers`)

FLOAT32 = np.dtype(np.float32)
LOW = frozenset(np.dtype(d) for d in (jnp.float16, jnp.bfloat16))
FLOATS = LOW | {FLOAT32}  # autocast casts between these


class CastLists(NamedTuple):
    """Which operations run in which dtype. Hashable: a key for plans.

    Attributes:
      dtype: float16 or bfloat16; None: all operations run as they were written.
      allow: names that run in `dtype`.
      force_fp32: names that run in float32.
      widest: names that run in the widest dtype of their inputs.
      modules: dtypes of modules by pattern (`tree_paths`); None: as it was written. The first that fits counts.
      keeps: says of a flax module whether a policy keeps it in float32; None: none is kept.
      because: why these lists hold, for people to read: with `dtype` None, why operations run as they were written.
      chooser: says which matmuls of a function run narrower than `dtype` (`weighted_matmuls`); None: none.
      float32_products: which products of 16-bit operands return float32: "all", as a layer asks for it; "read", those
        whose results float32 operations alone read; "": none.
      highest_asks: whether `precision=HIGHEST` of a product asks for float32. Where it is the default around the
        function, it says nothing of one product.
    """

    dtype: np.dtype | None
    allow: frozenset[str] = ALLOW
    force_fp32: frozenset[str] = FORCE_FP32
    widest: frozenset[str] = WIDEST
    modules: tree_paths.Patterns = tree_paths.Patterns("autocast(modules=)", (), of="module")
    keeps: Any = None
    because: str = ""
    chooser: Any = None
    float32_products: str = ""
    highest_asks: bool = True

    def at(self, path: str) -> "CastLists":
        """The lists in the module at `path`, where one of `modules` names it."""
        pattern = self.modules.first(path)
        if pattern is None:
            return self
        dtype = self.modules.values[pattern]
        return self._replace(dtype=dtype, because="modules=" if dtype is None else "")

    def off(self, because: str) -> "CastLists":
        """These lists where operations run as they were written, as all of them do for a reason that is told."""
        return self._replace(dtype=None, because=because)

    def group(self, name: str) -> str | None:
        """`"allow"`, `"force_fp32"`, `"widest"`, or None: as it was written."""
        if self.dtype is None:
            return None
        groups = (("allow", self.allow), ("force_fp32", self.force_fp32), ("widest", self.widest))
        return next((group for group, names in groups if name in names), None)

    def inside(self, group: str) -> "CastLists":
        """The lists inside a function that a list names: its parts follow the dtypes of its inputs."""
        if group == "force_fp32":
            return OFF.off("force_fp32=")
        return CastLists(self.dtype, frozenset(), frozenset(), self.allow | self.force_fp32 | self.widest)


OFF = CastLists(None)


def kind_of_cast(eqn: Any, dtype: Any) -> str | None:
    """What an equation casts, in a function with autocast to `dtype`.

    `"same"`: nothing, perhaps its weak type; `"low"`: to `dtype`; `"mark"`: it is the mark of a layer's 16-bit result;
    `"wide"`: 16 bits to float32, so that casting back gives what there was; None: no cast of these.
    """
    if eqn.primitive.name == "name":
        return "mark" if eqn.params["name"] == LOW_MARK else None
    if eqn.primitive.name != "convert_element_type":
        return None
    old, new = eqn.invars[0].aval.dtype, eqn.params["new_dtype"]
    if old == new:
        return "same"
    return "low" if new == dtype else "wide" if old in LOW and new == FLOAT32 else None


def is_custom_scatter(eqn: Any) -> bool:
    """Whether an equation scatters with a function of the user: `x.at[i].apply(fn)`, traced for one dtype."""
    update = eqn.params.get("update_jaxpr") if eqn.primitive.name == "scatter" else None
    return update is not None and bool(update.eqns)


def group_of(eqn: Any, lists: "CastLists") -> str | None:
    """The group of an equation by its lists: that of its name, but some products are no matmuls.

    A product that sums few elements is elementwise work. One in which every axis is summed or shared (`jnp.vdot`,
    `einsum("bk,bk->b")`) is a sum of products, as `jnp.sum(a * b)` is. One whose code says how exact it must be runs as
    it was written.
    """
    group = lists.group(jaxprs.function_name(eqn) if jaxprs.functions_of(eqn) else eqn.primitive.name)
    if group != "allow":
        return group
    if names_precision(eqn, lists):
        return None
    return "widest" if is_short(eqn) else "force_fp32" if only_sums(eqn) else group


def names_precision(eqn: Any, lists: "CastLists") -> bool:
    """Whether a product names its algorithm, or `precision=HIGHEST` (`"float32"` is the same) where that asks."""
    precision = eqn.params.get("precision")
    if precision is None:
        return False
    precisions = precision if isinstance(precision, tuple) else (precision,)
    if all(isinstance(p, jax.lax.Precision) for p in precisions):
        return lists.highest_asks and jaxprs.is_highest(precision)
    return True


def returns_float32(eqn: Any, lists: "CastLists") -> bool:
    """Whether a product asks for a float32 result of 16-bit operands: of those it was traced with, or of its lists."""
    if eqn.primitive.name not in jaxprs.MATMULS | jaxprs.RAGGED_MATMULS:
        return False
    operand_dtypes = {v.aval.dtype for v in eqn.invars if v.aval.dtype in FLOATS}
    asks = asks_for_float32(eqn.params.get("preferred_element_type")) and FLOAT32 not in operand_dtypes
    return asks or lists.float32_products == "all"


def asks_for_float32(preferred_element_type: Any) -> bool:
    """Whether a `preferred_element_type` is float32."""
    try:
        return preferred_element_type is not None and np.dtype(preferred_element_type) == np.float32
    except TypeError:
        return False


def takes_scalars(eqn: Any) -> bool:
    """Whether an equation is arithmetic that may have float32 scalars: in float32 in each element, rounded once."""
    return eqn.primitive.name in _WITH_SCALARS or is_short(eqn)


def is_short(eqn: Any) -> bool:
    """Whether an equation is a product that sums at most `SHORT` elements: geometry, digits, scaling; no layer."""
    return eqn.primitive.name == "dot_general" and terms_of(eqn) <= SHORT


def terms_of(eqn: Any) -> int:
    """How many products an element of the result of a `dot_general` is the sum of."""
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return math.prod(eqn.invars[0].aval.shape[a] for a in contracted)


def rounds_once(eqn: Any) -> bool:
    """Whether an equation or its derivative adds up numbers: in float32, where its inputs are of 16 bits, too.

    The gradient of an element is the sum over the windows, or the places, of which it is the largest.
    """
    name, params = eqn.primitive.name, eqn.params
    if name in SCATTERED:
        return not params["unique_indices"]
    if name in WINDOWS:
        names = ("window_dimensions", "window_strides", "window_dilation")
        return any(
            size > (step if apart == 1 else 1) for size, step, apart in zip(*map(params.get, names), strict=True)
        )
    return name in ("cummax", "cummin") or (is_short(eqn) and terms_of(eqn) > 1)


def only_sums(eqn: Any) -> bool:
    """Whether an equation is a product of which neither side has an axis of its own: no matrix takes part in it."""
    if eqn.primitive.name != "dot_general":
        return False
    contracted, shared = eqn.params["dimension_numbers"]
    sides = zip(eqn.invars, contracted, shared, strict=True)
    return all(len(x.aval.shape) == len(summed) + len(along) for x, summed, along in sides)


def is_linear_algebra(eqn: Any) -> bool:
    """Whether an equation calls a function of jax's linear algebra (`expm`, `pinv`, ...): it stays as written."""
    name, file = jaxprs.source_of(eqn)
    path = pathlib.PurePath(file)
    return "linalg" in (path.stem, path.parent.name) and path.is_relative_to(_JAX) and name not in PRODUCTS


def make_lists(
    dtype: jax.typing.DTypeLike,
    allow: Iterable[str] = (),
    force_fp32: Iterable[str] = (),
    widest: Iterable[str] = (),
    modules: Mapping[str, jax.typing.DTypeLike] | None = None,
    keeps: Any = None,
) -> CastLists:
    """The lists for the arguments of `autocast`, which move names from one list to another; checks the arguments."""
    dtype = check_dtype(dtype)
    moved: dict[str, str] = {}
    for argument, names in (("allow", allow), ("force_fp32", force_fp32), ("widest", widest)):
        if isinstance(names, str):
            raise TypeError(
                f"autocast: {argument} must be a collection of names; got the string {names!r}. Write ({names!r},)"
            )
        for name in names:
            _check_name(argument, name)
            if moved.setdefault(name, argument) != argument:
                raise ValueError(f"autocast: {name!r} stands in {moved[name]} and in {argument}; leave it in one")
    others = tuple((pattern, check_dtype(d)) for pattern, d in (modules or {}).items())
    if dtype == jnp.float32:
        if any(d != jnp.float32 for _, d in others):
            raise ValueError(
                f"autocast: dtype must be 16-bit beside modules={modules!r}; got float32. Pass dtype=jnp.bfloat16, and "
                f'"*": jnp.float32 in modules.'
            )
        return OFF
    to = {group: frozenset(n for n, g in moved.items() if g == group) for group in ("allow", "force_fp32", "widest")}
    return CastLists(
        dtype,
        ALLOW.difference(moved) | to["allow"],
        FORCE_FP32.difference(moved) | to["force_fp32"],
        WIDEST.difference(moved) | to["widest"],
        tree_paths.Patterns(
            "autocast(modules=)", {pattern: None if d == jnp.float32 else d for pattern, d in others}, of="module"
        ),
        keeps,
    )


def check_dtype(dtype: jax.typing.DTypeLike) -> np.dtype:
    """`dtype` as a numpy dtype; a ValueError if autocast cannot run in it."""
    check_no_device("autocast", dtype)
    try:
        checked = jnp.dtype(formats.DTYPES.get(str(dtype), dtype))
    except TypeError:
        raise ValueError(f"autocast: dtype must be float16, bfloat16 or float32 (off); got {dtype!r}") from None
    if checked in FLOATS:
        return checked
    if checked.name.startswith("float8"):
        raise ValueError(
            f"autocast: dtype must be float16, bfloat16 or float32 (off); got {checked.name}. For fp8 use "
            f"jaxmp.fp8.autocast."
        )
    raise ValueError(f"autocast: dtype must be float16, bfloat16 or float32 (off); got {checked.name}")


def _known_names() -> frozenset[str]:
    names = {getattr(primitives, n).name for n in dir(primitives) if n.endswith("_p")}
    names |= {getattr(jax.lax, n).name for n in dir(jax.lax) if n.endswith("_p")}
    return frozenset(names | ALLOW | FORCE_FP32 | WIDEST)


def _check_name(argument: str, name: str) -> None:
    known = _known_names()
    if name in known:
        return
    close = difflib.get_close_matches(str(name), known, n=3)
    hint = f" Close to it: {', '.join(close)}." if close else ""
    raise ValueError(
        f"autocast: {argument} must hold names that jaxmp.explain_autocast(fn, *args) lists; got {name!r}.{hint}"
    )


_DEVICES = ("cuda", "cpu", "gpu", "tpu", "xpu", "mps")


def check_no_device(what: str, argument: Any) -> None:
    """Raises a TypeError for `GradScaler("cuda")` and the like."""
    if isinstance(argument, str) and argument in _DEVICES:
        raise TypeError(f"{what} takes no device; got {argument!r}. Leave it out.")

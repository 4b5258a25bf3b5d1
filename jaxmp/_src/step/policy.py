"""Policies: which dtype each part of a model has.

A policy names three dtypes, in jmp's vocabulary: of stored *params*, of *computation* and of *outputs*. Mixed-precision
training keeps params and activations in 16 bits, and the loss, the optimizer and the masters in float32:

    name      params  compute  output  matmuls
    "fp32"    f32     f32      f32     full float32 precision, also on tensor cores
    "tf32"    f32     f32      f32     TensorFloat-32: 10 bits of mantissa inside the matmul
    "fp16"    f16     f16      f32     float16: 10 bits of mantissa, 6e-8 to 65504, needs a loss scale
    "bf16"    bf16    bf16     f32     bfloat16: 7 bits of mantissa, the range of float32
    "fp8"     f32     bf16     f32     8 bits with a scale for each tensor, in the layers built for it (`jaxmp.fp8`)

Some leaves should stay in float32 in every model: the gains of norms, a router, a temperature. A policy names them by
path, `keep_fp32=("*norm*",)`; such a leaf has one copy only and is its own master. Under the policy, a flax layer whose
params are all named computes in float32, too.

`reduce_dtype="float32"` says that devices sum gradients in float32. Under plain jit XLA sums them where the backward
pass makes them, in the dtype they have there: with it, `value_and_grad` makes the gradients of weights in float32.

The vocabulary is that of jmp (https://github.com/google-deepmind/jmp); jmp's strings and Policy objects work too. So do
names of other systems for float32 params and 16-bit computation ("16-mixed", "mixed_bfloat16"). If jaxmp does not
support what a name means, it raises an error with the name to use.
"""

import contextlib
import dataclasses
import difflib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import numpy as np
from jaxtyping import PyTree

from jaxmp._src.base import tree_paths
from jaxmp._src.fp8 import delayed, scale_leaves
from jaxmp._src.numerics import casting, formats

_PRESETS: dict[str, tuple[Any, Any, Any, str | None]] = {
    "fp32": (jnp.float32, jnp.float32, jnp.float32, "highest"),
    "tf32": (jnp.float32, jnp.float32, jnp.float32, "tensorfloat32"),
    "fp16": (jnp.float16, jnp.float16, jnp.float32, None),
    "bf16": (jnp.bfloat16, jnp.bfloat16, jnp.float32, None),
    "fp8": (jnp.float32, jnp.bfloat16, jnp.float32, None),
}

# Names of other systems, by what they mean there: params stay float32, and autocast computes in 16 bits.
_ALIASES = {
    **dict.fromkeys(("16-mixed", "fp16-mixed", "mixed_float16"), "params=float32,compute=float16,output=float32"),
    **dict.fromkeys(("bf16-mixed", "mixed_bfloat16"), "params=float32,compute=bfloat16,output=float32"),
    **dict.fromkeys(("32", "32-true", "fp32-true"), "fp32"),
    **dict.fromkeys(("fp8-delayed", "fp8-mixed"), "fp8"),
}

_PURE = "16-bit params without float32 masters, whose small steps are lost; {!r} has 16-bit params with masters"
_AMP = "is float16 in autocast with float32 params: '16-mixed'. Or 'fp16', with float16 params and float32 masters"
_RECIPE = "is another recipe: dataclasses.replace(jaxmp.get_policy('fp8'), recipe=jaxmp.fp8.{}())"
# Names of other systems that are refused: what they mean, and the name to use.
_REFUSED = {
    **dict.fromkeys(("16-true", "fp16-true", "O3"), "means " + _PURE.format("fp16")),
    "bf16-true": "means " + _PURE.format("bf16"),
    **dict.fromkeys(("16", "amp", "O1"), _AMP),
    "O2": "is float16 params with float32 masters: 'fp16'",
    "O0": "is float32: 'fp32'",
    "no": "is float32: 'fp32'",
    **dict.fromkeys(("64", "64-true", "fp64", "double"), "is float64, and jaxmp trains in float32 at most: 'fp32'"),
    **dict.fromkeys(("transformer-engine", "te", "fp8-hybrid"), "is fp8 with delayed scaling: 'fp8'"),
    "transformer-engine-float16": "is fp8 in float16 modules, which need a loss scale: 'fp16', with recipe= and "
    "jaxmp.fp8.autocast",
    **dict.fromkeys(("fp8-current", "fp8-tensorwise"), _RECIPE.format("CurrentScaling")),
    **dict.fromkeys(("fp8-block", "fp8-blockwise"), _RECIPE.format("BlockScaling")),
    **dict.fromkeys(("fp8-rowwise", "rowwise"), _RECIPE.format("RowwiseScaling")),
    "mxfp8": _RECIPE.format("MXFP8"),
    **dict.fromkeys(("nvfp4", "fp4"), _RECIPE.format("NVFP4")),
}


@dataclasses.dataclass(frozen=True)
class Policy(jmp.Policy):
    """The dtypes of a model's params, computation and outputs, and the leaves that stay float32.

    A `jmp.Policy` with path rules; it can be passed wherever jmp's is expected. Make one with `get_policy`.

    Attributes:
      param_dtype: dtype in which `cast_to_param` stores floating params.
      compute_dtype: dtype of `cast_to_compute`; pass it to flax modules as `dtype=`.
      output_dtype: dtype of `cast_to_output`.
      keep_fp32: patterns of paths; leaves that fit one stay float32, and so does the computation of flax's layers whose
        params all fit.
      says_keep_fp32: whether the user said `keep_fp32`, also `()`; if not, that of a TrainState holds. Not compared.
      matmul_precision: precision of float32 matmuls inside `default_matmul_precision()`; None leaves jax's own.
      recipe: fp8 recipe of the policy's matmuls, a `DelayedScaling()` for "fp8"; None: no fp8.
      reduce_dtype: float32, or None, in which `value_and_grad` makes gradients, so that devices sum them in it; None:
        in the compute dtype, as by `jax.grad` of an autocast function. `"auto"` becomes float32 for float32 params and
        16-bit computation without fp8, else None.

    Example:
      >>> policy = get_policy("fp16", keep_fp32=("*norm*",))
      >>> params = {"dense": jnp.ones(2), "LayerNorm_0": jnp.ones(2)}
      >>> {k: str(v.dtype) for k, v in policy.cast_to_param(params).items()}
      {'LayerNorm_0': 'float32', 'dense': 'float16'}
    """

    keep_fp32: tuple[str, ...] = ()
    matmul_precision: str | None = None
    recipe: Any = None
    says_keep_fp32: bool = dataclasses.field(default=False, compare=False)
    reduce_dtype: Any = "auto"

    def __post_init__(self) -> None:
        for field in ("param_dtype", "compute_dtype", "output_dtype"):
            dtype = jnp.dtype(getattr(self, field))
            if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
                raise ValueError(
                    f"a policy's {field} must be a float of 16 bits or more; got {dtype}. For fp8 use the policy 'fp8'."
                )
            object.__setattr__(self, field, dtype)
        object.__setattr__(self, "keep_fp32", tree_paths.patterns_of(self.keep_fp32))
        object.__setattr__(self, "says_keep_fp32", self.says_keep_fp32 or bool(self.keep_fp32))
        object.__setattr__(self, "reduce_dtype", self._checked_reduce_dtype())

    def _checked_reduce_dtype(self) -> Any:
        """float32 or None, from what was given."""
        reduce_dtype = self.reduce_dtype
        if isinstance(reduce_dtype, str) and reduce_dtype == "auto":
            return self._usual_reduce_dtype()
        if reduce_dtype is None:
            return None
        if formats.DTYPES.get(str(reduce_dtype), reduce_dtype) not in ("float32", np.float32, np.dtype(np.float32)):
            raise ValueError(f"a policy's reduce_dtype must be float32 or None; got {reduce_dtype!r}.")
        if self.recipe is not None:
            raise ValueError(
                f"a policy with a recipe must have no reduce_dtype; got {reduce_dtype!r} with {self.recipe!r}. Leave "
                f"it out."
            )
        if self.param_dtype.itemsize == 2 and not self.computes_in_16_bits:
            raise ValueError(
                f"reduce_dtype must go with computation in 16 bits; got {reduce_dtype!r} with "
                f"compute_dtype={self.compute_dtype}. Leave it out."
            )
        return np.dtype(np.float32)

    def _usual_reduce_dtype(self) -> Any:
        is_mixed = self.param_dtype == jnp.float32 and self.computes_in_16_bits and self.recipe is None
        return np.dtype(np.float32) if is_mixed else None

    def __str__(self) -> str:
        text = f"params={self.param_dtype},compute={self.compute_dtype},output={self.output_dtype}"
        others = (field for field in dataclasses.fields(self) if field.name in Policy.__annotations__ and field.compare)
        shown = {
            field.name: getattr(self, field.name)
            for field in others
            if field.name != "reduce_dtype" and getattr(self, field.name) != field.default
        }
        if self.reduce_dtype != self._usual_reduce_dtype():
            shown["reduce_dtype"] = None if self.reduce_dtype is None else self.reduce_dtype.name
        return text + "".join(f" {name}={value!r}" for name, value in shown.items())

    @property
    def computes_in_16_bits(self) -> bool:
        """Whether matmuls run in float16 or bfloat16.

        Example:
          >>> get_policy("fp8").computes_in_16_bits, get_policy("tf32").computes_in_16_bits
          (True, False)
        """
        return self.compute_dtype.itemsize == 2

    @property
    def uses_float16(self) -> bool:
        """Whether params or activations are float16, whose narrow range asks for a loss scale.

        Example:
          >>> get_policy("fp16").uses_float16, get_policy("bf16").uses_float16
          (True, False)
        """
        return "float16" in (self.param_dtype.name, self.compute_dtype.name)

    def param_dtype_of(self, path: str) -> jnp.dtype:
        """The dtype in which the param at `path` is stored.

        Example:
          >>> str(get_policy("bf16", keep_fp32=("*scale",)).param_dtype_of("ln/scale"))
          'float32'
        """
        return jnp.dtype(jnp.float32) if self._keeps_float32(path) else self.param_dtype

    def _keeps_float32(self, path: str) -> bool:
        return scale_leaves.is_scale(path) or tree_paths.matches(path, self.keep_fp32)

    def cast_to_param(self, tree: PyTree) -> PyTree:
        """`tree` as the model stores it: floating leaves in `param_dtype`, those of `keep_fp32` in float32.

        Values beyond the range of `param_dtype` saturate at its largest finite value (a plain cast, and jmp, give
        inf). Ints, keys, complex numbers and 8-bit floats do not change; `jax.ShapeDtypeStruct` leaves are cast like
        arrays.

        Args:
          tree: pytree of arrays, of any shapes.

        Returns:
          A tree of the same structure and shapes.
        """
        return tree_paths.map_with_path(
            lambda path, x: casting.cast_float(x, self.param_dtype_of(path), saturate=True), tree
        )

    def cast_to_compute(self, tree: PyTree) -> PyTree:
        """`tree` with floating leaves in `compute_dtype`, those of `keep_fp32` in float32; overflow becomes inf."""

        def cast(path: str, x: Any) -> Any:
            return casting.cast_float(x, jnp.float32 if self._keeps_float32(path) else self.compute_dtype)

        return tree_paths.map_with_path(cast, tree)

    def cast_to_output(self, tree: PyTree) -> PyTree:
        """`tree` with every floating leaf in `output_dtype`."""
        return tree_paths.map_with_path(
            lambda path, x: x if scale_leaves.is_scale(path) else casting.cast_float(x, self.output_dtype), tree
        )

    def default_matmul_precision(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which float32 matmuls are traced at this policy's precision.

        `"fp32"` sets full float32, `"tf32"` TensorFloat-32; other policies keep jax's default. `jaxmp.autocast(policy)`
        and `value_and_grad(policy=)` enter it. By hand, enter it inside the jitted function, or around each of its
        calls: outside of it `jax.jit` traces anew.

        Example:
          >>> with get_policy("fp32").default_matmul_precision():
          ...     y = jnp.ones((2, 2)) @ jnp.ones((2, 2))
        """
        if self.matmul_precision is None:
            return contextlib.nullcontext()
        return jax.default_matmul_precision(self.matmul_precision)


def get_policy(
    policy: str | jmp.Policy,
    *,
    keep_fp32: str | Sequence[str] | None = None,
    reduce_dtype: Any = "auto",
) -> Policy:
    """The policy of a name, a jmp string or a jmp policy.

    Args:
      policy: `"fp32"`, `"tf32"`, `"fp16"`, `"bf16"`, `"fp8"` (see the module's table); any string of jmp, such as
        `"params=float32,compute=bfloat16,output=float32"`; a name of another system: `"16-mixed"`, `"mixed_float16"`
        (float32 params, float16 computation), `"bf16-mixed"`, `"mixed_bfloat16"`, `"32-true"`, `"fp8-delayed"`; a
        `jmp.Policy`; or a `Policy`, whose patterns are extended by those of `keep_fp32`.
      keep_fp32: patterns of paths such as `"encoder/LayerNorm_0/scale"`; leaves that fit one stay float32, and under
        the policy a flax layer whose params all fit (`"head/*"`) computes in float32. `()`: none stays.
      reduce_dtype: float32: `value_and_grad` makes the gradients of weights in float32 (the products of 16-bit
        matrices, and sums over rows), so that devices sum them in float32: XLA under plain jit, and your own `pmean` in
        `jax.shard_map`. It returns float32 gradients, which take 2 more bytes for each 16-bit param, and an all-reduce
        moves twice the bytes of 16 bits. None: in the dtype in which the backward pass computes. `"auto"`: float32 if
        the params are float32 and the computation is in 16 bits, without fp8 (`"bf16-mixed"`, `"16-mixed"`); for a
        `Policy` its own; else None.

    Returns:
      A `Policy`.

    Raises:
      ValueError: an unknown name, or one that means what jaxmp does not do (`"16-true"`: no masters), with the name to
        use; a dtype that is no float of 16 bits or more; params or computation in float64; another `reduce_dtype`, or
        one with a recipe of fp8, or with 16-bit params of a policy that computes in float32.
      TypeError: `policy` is neither a string nor a policy.

    Example:
      >>> str(get_policy("bf16"))
      'params=bfloat16,compute=bfloat16,output=float32'
      >>> print(get_policy("bf16", reduce_dtype="float32"))
      params=bfloat16,compute=bfloat16,output=float32 reduce_dtype='float32'
      >>> print(get_policy("bf16-mixed").reduce_dtype, get_policy("bf16").reduce_dtype)
      float32 None
      >>> get_policy("bf16-mixed") == get_policy("params=float32,compute=bfloat16,output=float32")
      True
    """
    result = _policy_from(policy, () if keep_fp32 is None else tree_paths.patterns_of(keep_fp32))
    if keep_fp32 is not None:
        result = dataclasses.replace(result, says_keep_fp32=True)
    if not (isinstance(reduce_dtype, str) and reduce_dtype == "auto"):
        result = dataclasses.replace(result, reduce_dtype=reduce_dtype)
    if jnp.float64 in (result.param_dtype, result.compute_dtype):  # a step is unscaled and taken in float32
        raise ValueError(f"a policy must be float16, bfloat16 or float32; got {result}. Use 'fp32'.")
    return result


def _policy_from(policy: str | jmp.Policy, keep_fp32: tuple[str, ...]) -> Policy:
    if isinstance(policy, Policy):
        return dataclasses.replace(policy, keep_fp32=policy.keep_fp32 + keep_fp32)
    if isinstance(policy, str) and policy in _PRESETS:
        param, compute, output, precision = _PRESETS[policy]
        recipe = delayed.DelayedScaling() if policy == "fp8" else None
        return Policy(param, compute, output, keep_fp32, precision, recipe)
    if isinstance(policy, str) and policy in _ALIASES:
        return get_policy(_ALIASES[policy], keep_fp32=keep_fp32)
    if isinstance(policy, str):
        if policy in _REFUSED:
            raise ValueError(f"a policy of jaxmp has another name: {policy!r} {_REFUSED[policy]}.")
        try:
            policy = jmp.get_policy(policy)
        except ValueError as e:
            raise ValueError(
                f"a policy must be one of {', '.join(map(repr, _PRESETS))} or a jmp string "
                f"('params=float32,compute=bfloat16,output=float32'); got {policy!r}{_close_to(policy)} ({e})"
            ) from e
    if isinstance(policy, jmp.Policy):
        return Policy(policy.param_dtype, policy.compute_dtype, policy.output_dtype, keep_fp32)
    raise TypeError(f"a policy must be a name, a jmp string or a jmp.Policy; got {_what_else(policy)}.")


def first_difference(policy: Policy, own: Policy, fields: Sequence[str]) -> tuple[str, Any, Any] | None:
    """(a field, its value, that of `own`) of the first of these fields in which two policies differ."""
    triples = ((field, getattr(policy, field), getattr(own, field)) for field in fields)
    return next((triple for triple in triples if triple[1] != triple[2]), None)


def is_policy(x: Any) -> bool:
    """Whether `x` is a policy or its name, and no dtype: `"float16"` and `jnp.float16` are dtypes.

    Example:
      >>> is_policy("fp8"), is_policy("bf16-mixed"), is_policy("float16"), is_policy(jmp.get_policy("half"))
      (True, True, False, True)
    """
    if not isinstance(x, str):
        return isinstance(x, jmp.Policy)
    return x in _PRESETS or x in _ALIASES or x in _REFUSED or x in ("half", "full") or "=" in x


def check_precision(name: str) -> None:
    """Raises a ValueError for a name that is neither a policy's nor a float dtype's."""
    dtypes = ("float16", "bfloat16", "float32")
    try:
        jnp.dtype(formats.DTYPES.get(name, name))
    except TypeError:
        raise ValueError(
            f"autocast takes a dtype ({', '.join(map(repr, dtypes))}) or a policy "
            f"({', '.join(map(repr, (*_PRESETS, *_ALIASES)))}, or a jmp string); got {name!r}{_close_to(name, dtypes)}"
        ) from None


def _what_else(x: Any) -> str:
    """What was given in place of a policy, and what to write."""
    if hasattr(x, "init") and hasattr(x, "update"):
        return "an optimizer. The order is mixed_precision(inner, policy)"
    if isinstance(x, np.dtype | type):
        name = jnp.dtype(x).name
        names = {"float32": ("fp32",), "float16": ("fp16", "16-mixed"), "bfloat16": ("bf16", "bf16-mixed")}
        names |= dict.fromkeys(("float8_e4m3fn", "float8_e5m2"), ("fp8",))
        policies = " or ".join(map(repr, names.get(name, ())))
        return f"the dtype {name}" + (f". Use {policies}" + " (float32 params)" * ("-" in policies) if policies else "")
    hint = {16: ". Use '16-mixed'", 32: ". Use 'fp32'"}.get(x, "") if isinstance(x, int) else ""
    return type(x).__name__ + hint


def _close_to(name: str, others: Sequence[str] = ()) -> str:
    names = {known.lower(): known for known in (*_PRESETS, *_ALIASES, *others)}
    close = difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.7)
    return f", did you mean {names[close[0]]!r}?" if close else ""


def weight_decay_mask(params: PyTree) -> PyTree:
    """A tree of bools that is True where weight decay belongs: not on biases, and not on the gains of norms.

    For `optax.adamw(..., mask=jaxmp.weight_decay_mask)`. A leaf is False if it has fewer than two dimensions, or if its
    path fits `bias` or `*norm*` (in stacked layers, as `nn.scan` makes them, these have two). This is Megatron-LM's
    rule, extended to stacked layers.

    Args:
      params: pytree of arrays.

    Returns:
      A tree of Python bools with the structure of `params`.

    Example:
      >>> params = {"Dense_0": {"kernel": jnp.ones((2, 2)), "bias": jnp.ones(2)}, "LayerNorm_0": {"scale": jnp.ones(2)}}
      >>> weight_decay_mask(params)
      {'Dense_0': {'bias': False, 'kernel': True}, 'LayerNorm_0': {'scale': False}}
    """
    return tree_paths.map_with_path(
        lambda path, x: jnp.ndim(x) >= 2 and not tree_paths.matches(path, ("bias", "*norm*")), params
    )

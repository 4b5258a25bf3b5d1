"""Finds the dtypes in which a loss computes, from its derivative, and warns if they do not fit the policy.

jax promotes dtypes: a matmul of a float32 input with a bfloat16 param runs in float32. A model whose modules have no
dtype then trains in float32 with 16-bit params, which costs precision and saves no time. With a policy of float32
params and 16-bit computation ("16-mixed") that only the optimizer knows, it trains in plain float32. Neither case
raises an error, so this file warns.

`jax.vjp` has traced the loss and holds its linear part as a jaxpr. This jaxpr has each matmul between the params and
the loss, so the check needs no additional trace. Only before a warning, if it has nothing in 16 bits, the backward pass
is traced once more: it also shows the matmuls in derivative rules.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jaxmp._src.autocast import cast_lists, explain, regions
from jaxmp._src.base import compat
from jaxmp._src.base.warn import warn
from jaxmp._src.programs import jaxprs
from jaxmp._src.step import state as states
from jaxmp._src.step.policy import Policy

_MATMULS = jaxprs.MATMULS | jaxprs.RAGGED_MATMULS
_LITTLE = 0.25  # of the FLOPs: fp8 saves at most an eighth of the time then, and its scales have to be kept
_HIDDEN = frozenset({"custom_lin", "ffi_call", "custom_call", "pallas_call", "tpu_custom_call"})


class Dtypes(NamedTuple):
    """What computes in a program.

    Attributes:
      matmuls: the widest dtype of the operands of each matmul and convolution, which is the one it runs in.
      hidden: dtypes of the operands of rules and kernels that may contain matmuls.
      fp8: whether there is an array in fp8.
      only_short: whether each matmul sums so few elements that autocast keeps it in float32.
    """

    matmuls: set[np.dtype]
    hidden: set[np.dtype]
    fp8: bool
    only_short: bool


def warn_of_wide(
    pullback: Any,
    value: Any,
    params: PyTree,
    policy: Policy | None,
    opt_state: Any,
    *,
    has_fp8: bool,
    fp8_matmuls: int,
) -> bool:
    """Warns of a loss that does not compute as its params or its policy say. Returns whether it did.

    Args:
      pullback, value: from `jax.vjp` of the scaled loss.
      params: what it was differentiated with respect to.
      policy: the one in force, or None.
      opt_state: holds the loss scale.
      has_fp8: whether the params hold fp8 scales.
      fp8_matmuls: how many were noted while the loss was traced.
    """
    lists = regions.current()
    is_off = lists is not None and lists.dtype is None  # float32 is what the user wants
    # What has fp8 scales warns of them itself.
    of_low = states.computes_low(opt_state) and not has_fp8
    param_dtypes = {x.dtype for x in jax.tree.leaves(params) if getattr(x, "dtype", None) in _LOW}
    wants_low = not is_off and (policy.computes_in_16_bits if policy is not None else bool(param_dtypes) or of_low)
    wants_fp8 = policy is not None and policy.recipe is not None and not is_off
    looks_for_float16 = not states.may_scale(opt_state) and _F16 not in param_dtypes
    if not (wants_low or wants_fp8 or looks_for_float16):
        return False
    forward = look_into(compat.linear_jaxpr(pullback))
    exact = None
    if wants_fp8 and not fp8_matmuls and not forward.fp8:
        exact = _look_into_backward(pullback, value)
        if exact.matmuls and not exact.fp8:
            warn("nothing-in-fp8", _NO_FP8)
            return True
    is_told = policy is not None or lists is not None  # then autocast itself keeps short products in float32
    may_be_low = wants_low and not fp8_matmuls and not (is_told and forward.only_short)
    if may_be_low and not any(d.itemsize < 4 for d in forward.matmuls):
        exact = exact or _look_into_backward(pullback, value)
        if exact.matmuls and not any(d.itemsize < 4 for d in exact.matmuls | exact.hidden):
            said = "the policy of the optimizer computes in 16 bits (or a shared loss scale is for them)"
            if policy is not None:
                said = f"the policy says {policy.compute_dtype.name}"
            elif param_dtypes:
                said = f"the params are {' and '.join(sorted(d.name for d in param_dtypes))}"
            warn("nothing-in-16-bits", f"{said}, but {_NO_LOW if policy is None else _NO_LOW_POLICY}")
            return True
    if looks_for_float16 and _F16 in forward.matmuls | forward.hidden:
        name = "" if policy is None else f" (the policy is {policy})"
        warn(
            "float16-without-loss-scale",
            f"matmuls run in float16, and there is no loss scale{name}: gradients below 6e-8 become zero. Use "
            f'jaxmp.mixed_precision(tx, "fp16"), or bfloat16.',
        )
        return True
    return False


def warn_of_little_fp8(traced: Any, lists: Any, narrow: Any) -> None:
    """Warns of a loss under a policy of fp8 that runs few of its FLOPs in fp8, with the share (`rewrite.Look`)."""
    rows = [row for row in explain.plan(traced, lists, narrow).rows if row.name in _MATMULS]
    total, convolutions = (sum(row.flops for row in rows if what in row.name) for what in ("", "conv"))
    in_fp8 = sum(row.flops for row in rows if jnp.dtype(row.runs_in).itemsize == 1)
    if 0 < in_fp8 < _LITTLE * total:  # a loss with none is told by what knows why
        share = f" ({convolutions / total:.0%} are of convolutions)" if convolutions else ""
        warn(
            "little-in-fp8",
            f"the policy says fp8, and {in_fp8 / total:.0%} of the FLOPs of the loss's matmuls and convolutions run in "
            f'it; the rest{share} stays in 16 bits. Use "bf16", or choose more layers by filter=. '
            f"jaxmp.explain_autocast(loss_fn, *args, dtype=policy) shows each layer.",
        )


def _look_into_backward(pullback: Any, value: Any) -> Dtypes:
    one = compat.as_varying(jnp.ones_like(value), tuple(compat.varying_axes(value)))
    return look_into(jax.make_jaxpr(pullback)(one))


_F16 = np.dtype(np.float16)
_LOW = (_F16, np.dtype(jnp.bfloat16))

_NO_FP8 = (
    "the policy says fp8, but no matmul of the loss runs in fp8. In linen, call model.init in "
    '`with jaxmp.autocast("fp8"):`; in nnx, jaxmp.nnx.to_fp8(model) before the optimizer. Else call '
    'jaxmp.autocast(loss_fn, "fp8", recipe=jaxmp.fp8.CurrentScaling()). The first and the last layer stay in 16 bits: '
    "filter= takes them, too."
)
_NOTHING = "no matmul or convolution of the loss runs in 16 bits or fp8"
_NO_LOW = (
    f"{_NOTHING}, as jax computes float32 inputs in float32. Call jaxmp.value_and_grad(loss_fn, policy=...), or pass "
    f'opt_state=state or opt_state=optimizer that carries a policy. For float32 say policy="fp32".'
)
_NO_LOW_POLICY = (
    f"{_NOTHING}. keep_fp32, jaxmp.no_autocast, autocast(enabled=False) or precision=HIGHEST keeps all in float32. "
    f"Take it away, or use a policy that computes in float32."
)


def look_into(jaxpr: Any) -> Dtypes:
    """What computes in a jaxpr, and in all that it calls."""
    all_dtypes, read, short = Dtypes(set(), set(), False, False), set(), []
    for eqn in jaxprs.equations(jaxpr):
        dtypes = jaxprs.dtypes_of(eqn.invars)
        read.update(dtypes)
        floats = [d for d in dtypes if jnp.issubdtype(d, jnp.floating)]
        if eqn.primitive.name in _MATMULS and floats and _is_of_matrices(eqn):
            all_dtypes.matmuls.add(max(floats, key=lambda d: d.itemsize))
            short.append(cast_lists.is_short(eqn))
        elif eqn.primitive.name in _HIDDEN:
            all_dtypes.hidden.update(floats)
    return all_dtypes._replace(fp8=jaxprs.any_fp8(read), only_short=bool(short) and all(short))


def _is_of_matrices(eqn: Any) -> bool:
    """Whether a matmul sums something, and both of its operands have rows: not so for products with a vector."""
    if eqn.primitive.name != "dot_general":
        return True
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = eqn.params["dimension_numbers"]
    lhs, rhs = eqn.invars[0].aval, eqn.invars[1].aval
    has_rows = lhs.ndim > len(lhs_contract) + len(lhs_batch) and rhs.ndim > len(rhs_contract) + len(rhs_batch)
    return has_rows and math.prod(lhs.shape[i] for i in lhs_contract) > 1

"""Which additions add the bias of a matmul or a convolution: `x @ w + b` is one operation in PyTorch, in 16 bits.

A bias is an input of the function, or a constant, that has the axes of the output features alone:

    x @ w + b           [N, F] + [F]            a bias: the last axes of the result, which come from one operand
    conv(x) + b         [N, F, H, W] + [F]      a bias: the axis of the convolution's features, wherever it is
    x[:, -1:] + x @ w   [N, 1] + [N, F]         no bias: another axis, and made of what the product is made of
    y + x @ w           [N, F] + [N, F]         no bias: a residual
    mean(h, 0) + h @ w  [F] + [N, F]            no bias: computed

All others are sums of what arrives, in float32 if one of it is.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax.extend import core

from jaxmp._src.autocast import cast_lists, regions
from jaxmp._src.autocast.cast_lists import CastLists
from jaxmp._src.programs import jaxprs


class Value(NamedTuple):
    """What is known of a value.

    Attributes:
      sources: the inputs of the function that it depends on, as the bits of an int; not those of biases.
      is_input: whether it is an input or a constant, or parts of some, moved and cast; not computed.
      varies: of what was repeated, or got axes of size one: the axes along which it is not constant; None of others.
      features: of the product of a matmul or a convolution, moved or not and with a bias or not: the axes of each
        operand that are its own; () of others.
      is_conv: whether these are those of a convolution, of which only the kernel has features.
    """

    sources: int
    is_input: bool = False
    varies: frozenset[int] | None = None
    features: tuple[frozenset[int], ...] = ()
    is_conv: bool = False


class Biases(NamedTuple):
    """What was found in a function.

    Attributes:
      lists, groups: the lists of each equation, and its group by these.
      equations: the additions that add a bias, by number.
      inner: for each equation with functions inside, what was found in these; not for jax's linear algebra.
      results: what is known of its results.
    """

    lists: list[CastLists]
    groups: list[str | None]
    equations: frozenset[int]
    inner: dict[int, tuple["Biases", ...]]
    results: list[Value]


def find_biases(jaxpr: Any, lists: CastLists, inputs: Sequence[Value] | None = None) -> Biases:
    """Finds the biases of a function with these inputs, for lists that hold outside of regions.

    Without `inputs` it is a whole function, whose inputs have nothing in common.
    """
    inputs = [Value(1 << i, is_input=True) for i in range(len(jaxpr.invars))] if inputs is None else inputs
    known = dict.fromkeys(jaxpr.constvars, _CONSTANT) | dict(zip(jaxpr.invars, inputs, strict=True))
    at = [regions.lists_of(eqn, lists) for eqn in jaxpr.eqns]
    groups = [cast_lists.group_of(eqn, here) for eqn, here in zip(jaxpr.eqns, at, strict=True)]
    biased, inside = set(), {}
    for i, (eqn, here) in enumerate(zip(jaxpr.eqns, at, strict=True)):
        operands = [_CONSTANT if isinstance(v, core.Literal) else known[v] for v in eqn.invars]
        name = eqn.primitive.name
        sources = functools.reduce(operator.or_, (v.sources for v in operands), 0)
        results = [Value(sources)] * len(eqn.outvars)
        if not cast_lists.is_linear_algebra(eqn) and (functions := jaxprs.functions_of(eqn)):
            values, biases = [Value(v.sources, v.is_input) for v in operands], []
            for function in functions:
                consts, carry, rows = function.parts(values)
                carry = [v._replace(is_input=False) for v in carry]  # it is computed
                biases.append(find_biases(function.jaxpr, here, [*consts, *carry, *rows]))
            inside[i] = tuple(biases)
            if name in jaxprs.JITS:
                results = inside[i][0].results
            elif name in jaxprs.CALLS:  # what has its own derivative may have its own dtypes, too
                results = [v._replace(features=()) for v in inside[i][0].results]
        elif name in jaxprs.MATMULS:
            # The bias of a product that runs in float32 is added in float32.
            if groups[i] == "allow" and not cast_lists.returns_float32(eqn, here):
                results = [Value(sources, features=_features_of(eqn), is_conv=name == "conv_general_dilated")]
        elif name in _PARTS or name in _MOVED:
            moved = _moved(eqn, operands[0]) if name in _MOVED else Value(0)
            is_input = all(v.is_input for v in operands)
            results = [moved._replace(sources=sources, is_input=is_input)] * len(eqn.outvars)
        elif name == "add":
            for k in (0, 1):
                if _is_bias(eqn, k, operands):
                    biased.add(i)
                    product = operands[1 - k]
                    results = [Value(product.sources, features=product.features, is_conv=product.is_conv)]
        known |= dict(zip(eqn.outvars, results, strict=True))
    results = [_CONSTANT if isinstance(v, core.Literal) else known[v] for v in jaxpr.outvars]
    return Biases(at, groups, frozenset(biased), inside, results)


_CONSTANT = Value(0, is_input=True)


def _is_bias(eqn: Any, k: int, operands: list[Value]) -> bool:
    """Whether operand `k` of an addition is the bias of the other."""
    bias, product = operands[k], operands[1 - k]
    if not product.features or not bias.is_input or bias.sources & product.sources:
        return False
    shape, whole = eqn.invars[k].aval.shape, eqn.outvars[0].aval.shape
    varies = bias.varies
    if shape != whole and len(shape) == len(whole):  # an addition repeats along axes of size one by itself
        varies = frozenset(a for a, n in enumerate(shape) if n > 1)
    if varies is None:
        return False
    for axes in product.features:
        is_last = product.is_conv or (bool(axes) and axes >= set(range(min(axes), len(whole))))
        # Where there is one feature, a bias is one number; elsewhere, one number is none.
        if is_last and varies <= axes and (varies or all(whole[a] == 1 for a in axes)):
            return True
    return False


def _features_of(eqn: Any) -> tuple[frozenset[int], ...]:
    if eqn.primitive.name == "conv_general_dilated":
        return (frozenset({eqn.params["dimension_numbers"].out_spec[1]}),)
    (left_contract, right_contract), (left_batch, _) = eqn.params["dimension_numbers"]
    # The result has the axes of the batch, then those of the left operand, then those of the right one.
    batch = len(left_batch)
    left = eqn.invars[0].aval.ndim - len(left_contract)
    right = left + eqn.invars[1].aval.ndim - len(right_contract) - batch
    return frozenset(range(batch, left)), frozenset(range(left, right))


def _moved(eqn: Any, value: Value) -> Value:
    """A value after a movement of its axes."""
    before, after = eqn.invars[0].aval, eqn.outvars[0].aval
    place = _MOVED[eqn.primitive.name](eqn, before.shape)
    features, varies = value.features if after.size == before.size else (), value.varies
    if not before.ndim and not value.sources:  # an array of one number, as `jnp.zeros` makes it
        return value
    if varies is not None or after.ndim > before.ndim or after.size > before.size:
        axes = frozenset(a for a, n in enumerate(before.shape) if n > 1) if varies is None else varies
        varies = frozenset(place[a] for a in axes) if axes <= place.keys() else None
    return value._replace(
        varies=varies, features=tuple(frozenset(place[a] for a in axes if a in place) for axes in features)
    )


def _place_in_reshape(eqn: Any, shape: tuple[int, ...]) -> dict[int, int]:
    """The new place of each axis after a reshape; axes that were split or joined have none."""
    new = eqn.outvars[0].aval.shape
    old_kept, new_kept = [a for a, n in enumerate(shape) if n > 1], [a for a, n in enumerate(new) if n > 1]
    if [shape[a] for a in old_kept] == [new[a] for a in new_kept]:
        return dict(zip(old_kept, new_kept, strict=True))
    if shape and new and shape[-1] == new[-1]:  # rows were joined or split; the last axis stayed
        return {len(shape) - 1: len(new) - 1}
    return {}


# Parts of inputs are inputs.
_PARTS = frozenset({"slice", "dynamic_slice", "gather", "split", "unstack", "concatenate", "stack", "rev"})
_MOVED: dict[str, Callable[[Any, tuple[int, ...]], dict[int, int]]] = {
    "transpose": lambda eqn, shape: {a: i for i, a in enumerate(eqn.params["permutation"])},
    "broadcast_in_dim": lambda eqn, shape: dict(enumerate(eqn.params["broadcast_dimensions"])),
    "reshape": _place_in_reshape,
    "squeeze": _place_in_reshape,
} | dict.fromkeys(
    jaxprs.HANDS_ON | {"convert_element_type", "copy", "stop_gradient"},
    lambda eqn, shape: {a: a for a in range(len(shape))},
)

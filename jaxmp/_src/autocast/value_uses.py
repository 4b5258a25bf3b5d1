"""Which operations use a value: the jaxpr shows it before anything runs, a list of single operations does not.

A jaxpr shows the parts of a softmax, a norm or a dense layer. A part alone would run in the wrong dtype. Four questions
about its neighbours correct its dtype:

- **Does it feed float32 operations only?** Then it runs in float32 as well: `x - max(x)` before an `exp`, the squares
  before the sum of a norm. In float16 a square of 300 is inf. XLA fuses both, so this moves no additional bytes. In a
  cross-entropy, the label's logit comes from the same float32 values as the sum of exponentials.
- **Is a sum the bias of a matmul?** `x @ w + b` is one operation in PyTorch, in 16 bits. It is one here where `x @ w`
  is a matmul or convolution and `b` varies along its output features only.
- **Does a power end in a bounded function?** GELU's cube ends in a tanh. bfloat16 has the range for it, and the
  residuals of the backward pass are half as large.
- **Does it feed matmuls only?** Then a weight is cast before it is transposed or enters a loop: once, not in every
  iteration.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from jax.extend import core

from jaxmp._src.autocast import cast_lists, regions
from jaxmp._src.autocast.cast_lists import CastLists
from jaxmp._src.programs import jaxprs


class Uses(NamedTuple):
    """The answers to these questions; equations are numbered by their place in the jaxpr.

    Attributes:
      low_inputs: for each input, whether only operations in 16 bits use it.
      wide_inputs: for each input, whether only operations in float32 use it.
      low: equations whose results go to operations in 16 bits only.
      wide: equations whose results go to operations in float32 only.
      biased: equations that add a bias to a matmul or a convolution.
      tamed: equations whose results all end in bounded functions.
      inner: for each equation with functions inside, the answers for these.
      wide_outputs: what the caller said of the outputs.
    """

    low_inputs: tuple[bool, ...]
    wide_inputs: tuple[bool, ...]
    low: frozenset[int]
    wide: frozenset[int]
    biased: frozenset[int]
    tamed: frozenset[int]
    inner: dict[int, tuple["Uses", ...]]
    wide_outputs: tuple[bool, ...]


class Features(NamedTuple):
    """Axes of a matmul's result that come from one operand alone; the weights may be on either side."""

    left: frozenset[int]
    right: frozenset[int]

    def hold(self, axes: frozenset[int] | None) -> bool:
        return axes is not None and (axes <= self.left or axes <= self.right)

    def at(self, place: dict[int, int]) -> "Features":
        return Features(*(frozenset(place[a] for a in side if a in place) for side in self))


def find_uses(jaxpr: Any, lists: CastLists, wide_outputs: tuple[bool, ...]) -> Uses:
    """Answers these questions for every equation of a jaxpr.

    `lists` hold outside of regions; `wide_outputs` says for each output whether the caller uses it in float32 only.
    """
    biased, _ = _find_biased(jaxpr, lists)
    low: dict[Any, bool] = {}
    wide: dict[Any, bool] = {}
    tame: dict[Any, bool] = {}

    def use(atom: Any, as_low: bool, as_wide: bool, as_tame: bool = False) -> None:
        if not isinstance(atom, core.Literal):
            low[atom] = low.get(atom, True) and as_low
            wide[atom] = wide.get(atom, True) and as_wide
            tame[atom] = tame.get(atom, True) and as_tame

    for atom, is_wide in zip(jaxpr.outvars, wide_outputs, strict=True):
        use(atom, False, is_wide)
    low_equations, wide_equations, tamed, inner = set(), set(), set(), {}
    for i, eqn in reversed(list(enumerate(jaxpr.eqns))):
        name = eqn.primitive.name
        here = regions.lists_of(eqn, lists)
        is_low = all(low.get(v, False) for v in eqn.outvars)
        is_wide = all(wide.get(v, False) for v in eqn.outvars)
        is_tame = all(tame.get(v, False) for v in eqn.outvars)
        if is_low:
            low_equations.add(i)
        if is_tame:
            tamed.add(i)
        functions = () if cast_lists.is_linear_algebra(eqn) else jaxprs.functions_of(eqn)
        if functions and cast_lists.group_of(eqn, here) is None:
            inner[i] = _uses_of_functions(eqn, functions, here, tuple(wide.get(v, False) for v in eqn.outvars))
            for atom, as_low, as_wide in _uses_of_operands(eqn, inner[i]):
                use(atom, as_low, as_wide)
            continue
        if is_wide and here.float32_products == "read":
            biased -= {i}  # its matmul returns float32
        group = "allow" if i in biased else cast_lists.group_of(eqn, here)
        if cast_lists.is_no_cast(eqn) or cast_lists.is_widening(eqn):
            use(eqn.invars[0], is_low, is_wide)
            continue
        can_be_wide = name in cast_lists.FUSIBLE | cast_lists.PARTS or cast_lists.sums_nothing(eqn)
        fused = group == "widest" and is_wide and can_be_wide
        is_product = group == "allow" and i not in biased
        if fused or (is_wide and is_product):
            wide_equations.add(i)
        as_low = group == "allow" or (is_low and name in cast_lists.BEFORE_CAST)
        as_low = as_low or (
            here.dtype is not None and (cast_lists.is_mark(eqn) or cast_lists.is_cast_to(eqn, here.dtype))
        )
        as_tame = name in cast_lists.BOUNDED or (is_tame and name in ("add", "mul", "sub", "neg"))
        for atom in eqn.invars:
            use(atom, as_low, fused or group == "force_fp32" or here.dtype is None, as_tame)
    return Uses(
        tuple(low.get(v, False) for v in jaxpr.invars),
        tuple(wide.get(v, False) for v in jaxpr.invars),
        frozenset(low_equations),
        frozenset(wide_equations),
        biased,
        frozenset(tamed),
        inner,
        wide_outputs,
    )


def _uses_of_functions(eqn: Any, functions: Any, lists: CastLists, wide: tuple[bool, ...]) -> tuple[Uses, ...]:
    through = eqn.primitive.name in jaxprs.CALLS
    return tuple(find_uses(jaxpr, lists, wide if through else (False,) * len(jaxpr.outvars)) for jaxpr, _ in functions)


def _uses_of_operands(eqn: Any, inner: tuple[Uses, ...]) -> list[tuple[Any, bool, bool]]:
    """How each operand of an equation with functions inside is used there."""
    if eqn.primitive.name in jaxprs.CALLS:
        return list(zip(eqn.invars, inner[0].low_inputs, inner[0].wide_inputs, strict=True))
    return [(v, False, False) for v in eqn.invars]


def _find_biased(jaxpr: Any, lists: CastLists) -> tuple[frozenset[int], dict[Any, Features]]:
    """The sums of a matmul's result and a value that varies along its features only; and the features of results."""
    features: dict[Any, Features] = {}
    varies: dict[Any, frozenset[int]] = {}  # for broadcast values, the axes along which they are not constant
    biased = set()
    for i, eqn in enumerate(jaxpr.eqns):
        name, out = eqn.primitive.name, eqn.outvars[0] if eqn.outvars else None
        variables: list[Any] = [v for v in eqn.invars if not isinstance(v, core.Literal)]
        if name in jaxprs.MATMULS:
            here = regions.lists_of(eqn, lists)
            # A float32 result that was asked for is no 16-bit one with its bias.
            if cast_lists.group_of(eqn, here) == "allow" and not cast_lists.returns_float32(eqn, here):
                features[out] = _features_of(eqn)
        elif name in _MOVED and variables:
            place = _MOVED[name](eqn, variables[0].aval.shape)
            before, after = variables[0].aval, eqn.outvars[0].aval
            grows = after.ndim > before.ndim or after.size > before.size
            if variables[0] in features and not grows:
                features[out] = features[variables[0]].at(place)
            if variables[0] in varies or grows:
                shape = variables[0].aval.shape
                axes = varies.get(variables[0], frozenset(a for a, n in enumerate(shape) if n > 1))
                if axes <= place.keys():
                    varies[out] = frozenset(place[a] for a in axes)
        elif name == "add" and len(variables) == 2:
            for matmul, bias in (variables, variables[::-1]):
                if matmul in features and bias not in features and features[matmul].hold(_axes(matmul, bias, varies)):
                    biased.add(i)
                    features[out] = features[matmul]
        elif name in jaxprs.JITS and (functions := jaxprs.functions_of(eqn)):
            inner, outer = functions[0][0], eqn.outvars
            found = _find_biased(inner, regions.lists_of(eqn, lists))[1]
            features |= {o: found[v] for o, v in zip(outer, inner.outvars, strict=True) if _is_in(v, found)}
    return frozenset(biased), features


def _is_in(atom: Any, found: dict[Any, Features]) -> bool:
    return not isinstance(atom, core.Literal) and atom in found  # a literal has no hash


def _axes(matmul: Any, bias: Any, varies: dict[Any, frozenset[int]]) -> frozenset[int] | None:
    """The axes along which an addend is not constant, if it was broadcast or is smaller; else None."""
    shape = bias.aval.shape
    if shape != matmul.aval.shape:  # a sum broadcasts axes of size one by itself
        return frozenset(a for a, n in enumerate(shape) if n > 1) if len(shape) == matmul.aval.ndim else None
    return varies.get(bias)


def _features_of(eqn: Any) -> Features:
    if eqn.primitive.name == "conv_general_dilated":
        return Features(frozenset(), frozenset({eqn.params["dimension_numbers"].out_spec[1]}))
    (left_contract, right_contract), (left_batch, _) = eqn.params["dimension_numbers"]
    batch = len(left_batch)
    left = eqn.invars[0].aval.ndim - len(left_contract) - batch
    right = eqn.invars[1].aval.ndim - len(right_contract) - batch
    return Features(frozenset(range(batch, batch + left)), frozenset(range(batch + left, batch + left + right)))


def _place_in_reshape(eqn: Any, shape: tuple[int, ...]) -> dict[int, int]:
    """The new place of each axis after a reshape; axes that were split or joined have none."""
    new = eqn.outvars[0].aval.shape
    old_kept, new_kept = [a for a, n in enumerate(shape) if n > 1], [a for a, n in enumerate(new) if n > 1]
    if [shape[a] for a in old_kept] == [new[a] for a in new_kept]:
        return dict(zip(old_kept, new_kept, strict=True))
    if shape and new and shape[-1] == new[-1]:  # rows were joined or split; the last axis stayed
        return {len(shape) - 1: len(new) - 1}
    return {}


_MOVED: dict[str, Callable[[Any, tuple[int, ...]], dict[int, int]]] = {
    "transpose": lambda eqn, shape: {a: i for i, a in enumerate(eqn.params["permutation"])},
    "broadcast_in_dim": lambda eqn, shape: dict(enumerate(eqn.params["broadcast_dimensions"])),
    "reshape": _place_in_reshape,
    "squeeze": _place_in_reshape,
    "convert_element_type": lambda eqn, shape: {a: a for a in range(len(shape))},
}

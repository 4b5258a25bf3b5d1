"""Which operations use a value: the jaxpr shows it before anything runs, a list of single operations does not.

A jaxpr shows the parts of a softmax, a norm or a dense layer. A part alone would run in the wrong dtype. Four questions
about its neighbours correct its dtype:

- **Does it feed float32 operations only?** Then it runs in float32 as well: `x - max(x)` before an `exp`, the squares
  before the sum of a norm. In float16 a square of 300 is inf. XLA fuses both, so this moves no additional bytes. In a
  cross-entropy, the label's logit comes from the same float32 values as the sum of exponentials.
- **Is it a sum with a bias?** `x @ w + b` is one operation in 16 bits, as in PyTorch (`biases`).
- **Does a power end in a bounded function?** GELU's cube ends in a tanh. bfloat16 has the range for it, and the
  residuals of the backward pass are half as large.
- **Does it feed matmuls only?** Then a weight is cast before it is transposed or enters a loop: once, not in every
  iteration.
"""

import collections
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend import core

from jaxmp._src.autocast import cast_lists
from jaxmp._src.autocast.biases import Biases
from jaxmp._src.autocast.cast_lists import CastLists
from jaxmp._src.programs import jaxprs


class Uses(NamedTuple):
    """The answers to these questions; equations are numbered by their place in the jaxpr.

    Attributes:
      lists, groups: the lists of each equation, and its group by these.
      low_inputs: for each input, whether only operations in 16 bits use it.
      wide_inputs: for each input, whether only operations in float32 use it.
      low: equations whose results go to operations in 16 bits only.
      wide: equations whose results go to operations in float32 only.
      biased: equations that add a bias to a matmul or a convolution.
      tamed: equations whose results all end in bounded functions.
      read_alike: equations whose results are read by operations in float32 alone, or by one operation.
      inner: for each equation with functions inside, the answers for these; none for those that a list names.
    """

    lists: list[CastLists]
    groups: list[str | None]
    low_inputs: tuple[bool, ...]
    wide_inputs: tuple[bool, ...]
    low: frozenset[int]
    wide: frozenset[int]
    biased: frozenset[int]
    tamed: frozenset[int]
    read_alike: frozenset[int]
    inner: dict[int, tuple["Uses", ...]]


def find_uses(jaxpr: Any, biases: Biases, wide_outputs: Sequence[bool] = ()) -> Uses:
    """Answers these questions for every equation of a jaxpr.

    `wide_outputs` says for each output whether the caller uses it in float32 only, by default of none.
    """
    biased = set(biases.equations)
    low: dict[Any, bool] = {}
    wide: dict[Any, bool] = {}
    tame: dict[Any, bool] = {}

    def use(atom: Any, as_low: bool, as_wide: bool, as_tame: bool = False) -> None:
        if not isinstance(atom, core.Literal):
            low[atom] = low.get(atom, True) and as_low
            wide[atom] = wide.get(atom, True) and as_wide
            tame[atom] = tame.get(atom, True) and as_tame

    readers = collections.Counter(v for v in jaxpr.outvars if not isinstance(v, core.Literal))
    for eqn in jaxpr.eqns:
        times = 2 if jaxprs.functions_of(eqn) else 1  # inside, there may be several
        readers.update({v: times for v in eqn.invars if not isinstance(v, core.Literal)})
    for atom, is_wide in zip(jaxpr.outvars, wide_outputs or [False] * len(jaxpr.outvars), strict=True):
        use(atom, False, is_wide)
    low_equations, wide_equations, tamed, read_alike, inner = set(), set(), set(), set(), {}
    for i, eqn in reversed(list(enumerate(jaxpr.eqns))):
        name, here, group = eqn.primitive.name, biases.lists[i], biases.groups[i]
        is_low = all(low.get(v, False) for v in eqn.outvars)
        is_wide = all(wide.get(v, False) for v in eqn.outvars)
        is_tame = all(tame.get(v, False) for v in eqn.outvars)
        if is_low:
            low_equations.add(i)
        if is_tame:
            tamed.add(i)
        if is_wide or all(readers[v] <= 1 for v in eqn.outvars):
            read_alike.add(i)
        if i in biases.inner and group is not None:
            inner[i] = ()
        elif i in biases.inner:
            through = [wide.get(v, False) for v in eqn.outvars] if name in jaxprs.CALLS else ()
            pairs = zip(jaxprs.functions_of(eqn), biases.inner[i], strict=True)
            inner[i] = tuple(find_uses(function.jaxpr, inside, through) for function, inside in pairs)
            for k, atom in enumerate(eqn.invars):
                uses = inner[i][0]
                use(atom, *((uses.low_inputs[k], uses.wide_inputs[k]) if name in jaxprs.CALLS else (False, False)))
            continue
        if is_wide and here.float32_products == "read":
            biased.discard(i)  # its matmul returns float32
        group = "allow" if i in biased else group
        cast = cast_lists.kind_of_cast(eqn, here.dtype)
        if cast in ("same", "wide"):
            use(eqn.invars[0], is_low, is_wide)
            continue
        can_be_wide = name in cast_lists.FUSIBLE | cast_lists.PARTS or cast_lists.is_short(eqn)
        fused = group == "widest" and is_wide and can_be_wide
        is_product = group == "allow" and i not in biased
        if fused or (is_wide and is_product):
            wide_equations.add(i)
        is_cast_low = here.dtype is not None and cast in ("low", "mark")
        as_low = group == "allow" or is_cast_low or (is_low and name in cast_lists.BEFORE_CAST)
        reads_float32 = group == "force_fp32" or here.dtype is None or cast_lists.names_precision(eqn, here)
        as_tame = name in cast_lists.BOUNDED or (is_tame and name in ("add", "mul", "sub", "neg"))
        for atom in eqn.invars:
            use(atom, as_low, fused or reads_float32, as_tame)
    return Uses(
        biases.lists,
        biases.groups,
        tuple(low.get(v, False) for v in jaxpr.invars),
        tuple(wide.get(v, False) for v in jaxpr.invars),
        frozenset(low_equations),
        frozenset(wide_equations),
        frozenset(biased),
        frozenset(tamed),
        frozenset(read_alike),
        inner,
    )

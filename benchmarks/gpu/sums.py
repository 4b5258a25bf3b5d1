"""A section of the GPU run: what autocast adds up, and the products that it leaves in float32, beside float64."""

import functools
import sys

import jax.numpy as jnp

from benchmarks.lib.tables import ROOT
from benchmarks.lib.timing import Bench


def sums(bench: Bench) -> None:
    """The cases of tests/autocast/test_sums.py at their greatest length, and the short products.

    A GPU multiplies float32 in TensorFloat-32 unless a product names its precision, and adds up 16-bit numbers in 16
    bits where a program says so: a CPU shows neither.
    """
    sys.path[:0] = [str(ROOT / "tests" / folder) for folder in ("autocast", "support")]
    import test_exact_products
    import test_sums

    def of_sum(name: str) -> dict[str, float]:
        gaps = test_sums.gaps(name, jnp.bfloat16, 64 if bench.tiny else 8192)
        assert max(gaps.values()) <= 2, gaps
        return gaps

    for name in test_sums.SUMS:
        bench.check(f"{name}, bf16", functools.partial(of_sum, name))
    for name in test_exact_products.SHORT:
        test = functools.partial(test_exact_products.test_products_of_few_elements_are_float32, name, jnp.bfloat16)
        bench.check(f"short product: {name}", test)
    for name in ("dot", "a convolution", "linen"):
        test = functools.partial(test_exact_products.test_the_highest_precision_is_float32, name, jnp.bfloat16)
        bench.check(f"precision=HIGHEST: {name}", test)

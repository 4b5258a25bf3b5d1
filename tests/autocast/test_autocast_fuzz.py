"""A sample of the public functions under autocast; `make autocast` runs all of them."""

import jax.numpy as jnp
import pytest

from autocast_fuzz import DTYPES, NAMES, check


def test_there_are_enough_functions() -> None:
    assert len(NAMES) >= 500
    rooms = {name.split(".")[0] for name in NAMES}
    assert {"jnp", "nn", "lax", "special", "stats", "linalg", "signal"} <= rooms


@pytest.mark.thorough(1)
@pytest.mark.parametrize("name", ["jnp.hypot", "jnp.einsum", "jnp.at.set", "nn.softmax where", "special.xlog1py"])
def test_a_sample_of_public_functions(name: str) -> None:
    check(name, jnp.float16, ("plain", "vmap", "scan"))


@pytest.mark.thorough(0)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_public_functions(name: str, dtype: str) -> None:
    check(name, DTYPES[dtype])

"""A sample of the public functions under autocast; `make autocast` runs all of them."""

import jax.numpy as jnp
import pytest

from autocast_fuzz import NAMES, check


def test_there_are_enough_functions() -> None:
    assert len(NAMES) >= 500
    rooms = {name.split(".")[0] for name in NAMES}
    assert {"jnp", "nn", "lax", "special", "stats", "linalg", "signal"} <= rooms


@pytest.mark.thorough(1)
@pytest.mark.parametrize("name", ["jnp.hypot", "jnp.einsum", "jnp.at.set", "nn.softmax where", "special.xlog1py"])
def test_some_public_functions(name: str) -> None:
    check(name, jnp.float16, ("plain", "vmap", "scan"))


@pytest.mark.thorough(0)
@pytest.mark.parametrize("name", NAMES[::16])
def test_every_sixteenth_public_function(name: str) -> None:
    check(name, jnp.bfloat16)

"""The first and the last layer of an nnx model are those that its call uses first and last."""

import jax.numpy as jnp
import pytest
from flax import nnx

import jaxmp
from jaxmp import fp8

KINDS = (nnx.Linear, nnx.Embed)


def _linear():
    return nnx.Linear(16, 16, rngs=nnx.Rngs(0))


class HeadFirst(nnx.Module):
    """The head is declared before the layers that it reads."""

    def __init__(self):
        self.head, self.up, self.down, self.embed = (_linear() for _ in range(4))

    def __call__(self, x):
        return self.head(nnx.relu(self.down(self.up(self.embed(x)))))


class Blocks(HeadFirst):
    def __init__(self):
        self.head, self.blocks, self.embed = _linear(), nnx.List([_linear(), _linear()]), _linear()

    def __call__(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class ByMethods(HeadFirst):
    def decode(self, h):
        return self.head(h)

    def encode(self, x):
        return self.up(self.embed(x))

    def __call__(this, x):
        return this.decode(this.down(this.encode(x)))


class Parts(nnx.Module):
    """Modules of modules; an end lies in another one."""

    def __init__(self):
        self.decoder, self.encoder = HeadFirst(), HeadFirst()
        self.sizes = (3, 3)  # holds no module

    def __call__(self, x):
        return self.decoder(self.encoder(x))


class Tied(HeadFirst):
    def __init__(self):
        self.up, self.down, self.embed = _linear(), _linear(), nnx.Embed(16, 16, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.embed.attend(self.down(self.up(self.embed(x))))


class ByName(HeadFirst):
    """Its code does not show the uses, so attributes count."""

    def __call__(self, x):
        for name in ("embed", "up", "down", "head"):
            x = getattr(self, name)(x)
        return x


@pytest.mark.parametrize(
    ("model", "narrow"),
    [
        (HeadFirst, ["up", "down"]),
        (Blocks, ["blocks/0", "blocks/1"]),
        (ByMethods, ["up", "down"]),
        (Tied, ["up", "down"]),
        (ByName, ["up", "down"]),
    ],
    ids=lambda x: getattr(x, "__name__", None),
)
def test_the_ends_are_those_of_the_call(model, narrow):
    assert jaxmp.nnx.to_fp8(model(), fp8.CurrentScaling()) == narrow


def test_ends_lie_in_the_modules_that_are_called_first_and_last():
    model = Parts()
    found = jaxmp.nnx.to_fp8(model, fp8.CurrentScaling())
    assert sorted(found) == sorted(
        f"{part}/{name}"
        for part in ("encoder", "decoder")
        for name in ("head", "up", "down", "embed")
        if (part, name) not in {("encoder", "embed"), ("decoder", "head")}
    )
    assert model(jnp.ones((16, 16))).shape == (16, 16)

"""Small models as users write them, with no dtype anywhere, in flax.linen and in flax.nnx: what autocast is tested on.

Five by name (`NAMES`): a CNN with BatchNorm, a transformer, an LSTM by hand and from flax, a mixture of experts; in nnx
those with a layer that autocast takes as one operation, since the operations of the others are linen's. `init_linen`
makes them; `loss_linen(name)` is `(params, batch, rest) -> (loss, rest)`, where `rest` are the other collections
(BatchNorm's statistics). `layers_linen` and `layers_nnx` give what each layer put out, under the names of
tests/oracles/torch_autocast.json. tests/autocast_twins.py has the linen models again, cast by hand.

Batches are `{"x", "y"}` from handwritten digits, or from the text that examples/train.py reads.
"""

import functools
from pydoc_data.topics import topics
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx, traverse_util
from jax import lax

from helpers import ROOT

NAMES = ("cnn", "transformer", "lstm", "lstm_module", "moe")
WIDTH, HEADS, EXPERTS = 32, 2, 4
LENGTH, VOCABULARY = 16, 256  # of the text, which is read byte by byte
FAR_BELOW = -1e9  # what users mask scores with; no float16 holds it


# Data


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Images float32 [1797, 8, 8] in 0..1, and labels int32 [1797], in scikit-learn's order."""
    with np.load(ROOT / "examples" / "data" / "digits.npz") as arrays:
        return arrays["images"].astype(np.float32) / 16, arrays["labels"].astype(np.int32)


def text() -> np.ndarray:
    """Python's language reference as bytes, uint8 [n]."""
    return np.frombuffer("\n\n".join(topics[name] for name in sorted(topics)).encode(), np.uint8)


def batches(name: str, steps: int, size: int = 64, seed: int = 0) -> dict[str, np.ndarray]:
    """`steps` batches for the model `name`, stacked: x and y [steps, size, ...]."""
    rng = np.random.default_rng(seed)
    if name == "transformer":
        source = text()
        at = rng.integers(0, len(source) - LENGTH, (steps, size, 1)) + np.arange(LENGTH + 1)
        tokens = source[at].astype(np.int32)
        return {"x": tokens[..., :-1], "y": tokens[..., 1:]}
    images, labels = digits()
    at = rng.integers(0, len(images), (steps, size))
    x = images[at]
    shape = {"cnn": (8, 8, 1), "moe": (64,)}.get(name, (8, 8))  # an LSTM reads row after row
    return {"x": x.reshape(steps, size, *shape), "y": labels[at]}


def batch(name: str, size: int = 4, seed: int = 0) -> dict[str, np.ndarray]:
    return {key: x[0] for key, x in batches(name, 1, size, seed).items()}


def cross_entropy(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def causal(length: int) -> Any:
    return jnp.tril(jnp.ones((1, 1, length, length), bool))


# flax.linen


def see(module: nn.Module, name: str, x: Any) -> Any:
    module.sow("intermediates", name, x)
    return x


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(16, (3, 3), name="conv1")(x)
        x = see(self, "relu1", nn.relu(nn.BatchNorm(use_running_average=False, name="bn1")(x)))
        x = see(self, "pool1", nn.max_pool(x, (2, 2), (2, 2)))
        x = nn.Conv(32, (3, 3), name="conv2")(x)
        x = see(self, "relu2", nn.relu(nn.BatchNorm(use_running_average=False, name="bn2")(x)))
        x = see(self, "pool2", x.mean((1, 2)))
        return nn.Dense(10, name="head")(x)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        rows, length, width = x.shape
        qkv = nn.Dense(3 * width, name="qkv")(nn.LayerNorm(name="norm1")(x))
        q, k, v = jnp.moveaxis(qkv.reshape(rows, length, 3, HEADS, width // HEADS), 2, 0)
        scores = see(self, "scores", jnp.einsum("bthd,bshd->bhts", q, k) * (width // HEADS) ** -0.5)
        weights = see(self, "softmax", nn.softmax(jnp.where(causal(length), scores, FAR_BELOW)))
        y = see(self, "mixed", jnp.einsum("bhts,bshd->bthd", weights, v)).reshape(x.shape)
        x = see(self, "residual1", x + nn.Dense(width, name="proj")(y))
        y = nn.Dense(4 * width, name="up")(nn.LayerNorm(name="norm2")(x))
        return see(self, "residual2", x + nn.Dense(width, name="down")(see(self, "gelu", nn.gelu(y))))


class Transformer(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCABULARY, WIDTH, name="bytes")(tokens)
        x = see(self, "embed", x + nn.Embed(LENGTH, WIDTH, name="positions")(jnp.arange(LENGTH))[None])
        x = Block(name="block0")(x)
        return nn.Dense(VOCABULARY, name="head")(nn.LayerNorm(name="norm")(x))


class Cell(nn.Module):
    @nn.compact
    def __call__(self, carry, x):
        h, c = carry
        gates = nn.Dense(4 * WIDTH, name="gates")(jnp.concatenate([x, h], -1))
        i, f, g, o = jnp.split(gates, 4, -1)
        i = see(self, "sigmoid", nn.sigmoid(i))
        c = see(self, "c", nn.sigmoid(f) * c + i * see(self, "tanh", nn.tanh(g)))
        h = see(self, "h", nn.sigmoid(o) * nn.tanh(c))
        return (h, c), None


class LSTM(nn.Module):
    @nn.compact
    def __call__(self, x):
        axes = {"variable_axes": {"intermediates": 0}, "variable_broadcast": "params"}
        scanned = nn.scan(Cell, **axes, split_rngs={"params": False}, in_axes=1)
        zeros = jnp.zeros((len(x), WIDTH))
        (h, _), _ = scanned(name="cell")((zeros, zeros), x)
        return nn.Dense(10, name="head")(h)


class LSTMModule(nn.Module):
    @nn.compact
    def __call__(self, x):
        (c, h), _ = nn.RNN(nn.LSTMCell(WIDTH, name="cell"), return_carry=True)(x)
        see(self, "c", c)
        return nn.Dense(10, name="head")(see(self, "h", h))


class MoE(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = see(self, "relu", nn.relu(nn.Dense(WIDTH, name="embed")(x)))
        probs = see(self, "softmax", nn.softmax(nn.Dense(EXPERTS, use_bias=False, name="router")(x)))
        gates, chosen = lax.top_k(probs, 2)
        see(self, "gates", gates)
        up = self.param("w_up", nn.initializers.lecun_normal(batch_axis=0), (EXPERTS, WIDTH, 2 * WIDTH))
        down = self.param("w_down", nn.initializers.lecun_normal(batch_axis=0), (EXPERTS, 2 * WIDTH, WIDTH))
        one_hot = jax.nn.one_hot(chosen, EXPERTS)  # [N, 2, E]
        y = see(self, "dispatched", jnp.einsum("nke,nd->end", one_hot, x))
        y = see(self, "gelu", nn.gelu(see(self, "up", jnp.einsum("end,edf->enf", y, up))))
        y = see(self, "down", jnp.einsum("enf,efd->end", y, down))
        combine = see(self, "combine", (one_hot * gates[..., None]).sum(1))
        y = see(self, "combined", jnp.einsum("ne,end->nd", combine, y))
        x = nn.LayerNorm(name="norm")(see(self, "residual", x + y))
        return nn.Dense(10, name="head")(x)


LINEN = {"cnn": CNN(), "transformer": Transformer(), "lstm": LSTM(), "lstm_module": LSTMModule(), "moe": MoE()}


@functools.cache
def init_linen(name: str, seed: int = 0) -> tuple[Any, Any]:
    """(params, the other collections), float32. Shared: do not donate them."""
    init = jax.jit(LINEN[name].init, compiler_options={"xla_backend_optimization_level": 0})
    variables = dict(init(jax.random.key(seed), batch(name)["x"]))
    variables.pop("intermediates", None)
    return variables.pop("params"), variables


@functools.cache
def shapes_linen(name: str) -> tuple[Any, Any]:
    """`init_linen` as shapes and dtypes: nothing is compiled."""
    variables = dict(jax.eval_shape(LINEN[name].init, jax.random.key(0), batch(name)["x"]))
    variables.pop("intermediates", None)
    return variables.pop("params"), variables


def loss_linen(name: str, model: nn.Module | None = None) -> Any:
    """`(params, batch, rest) -> (loss, rest)` of a linen model, `LINEN[name]` by default."""
    module = model or LINEN[name]

    def loss_fn(params, batch, rest):
        logits, rest = module.apply({"params": params, **rest}, batch["x"], mutable=list(rest))
        return cross_entropy(logits, batch["y"]), rest

    return loss_fn


def layers_linen(name: str, model: nn.Module | None = None) -> Any:
    """`(params, batch, rest) -> {layer: what it put out}`."""
    module = model or LINEN[name]

    def layers(params, batch, rest):
        logits, seen = module.apply(
            {"params": params, **rest}, batch["x"], mutable=[*rest, "intermediates"], capture_intermediates=True
        )
        flat = traverse_util.flatten_dict(dict(seen["intermediates"]))
        by_name = {"/".join(part for part in path if part != "__call__"): x[0] for path, x in flat.items()}
        return by_name | {"loss": cross_entropy(logits, batch["y"])}

    return layers


# flax.nnx. `seen` collects what layers put out.


def keep(seen: dict[str, Any], name: str, x: Any) -> Any:
    seen[name] = x
    return x


class NnxCNN(nnx.Module):
    def __init__(self, rngs):
        self.conv1, self.bn1 = nnx.Conv(1, 16, (3, 3), rngs=rngs), nnx.BatchNorm(16, rngs=rngs)
        self.conv2, self.bn2 = nnx.Conv(16, 32, (3, 3), rngs=rngs), nnx.BatchNorm(32, rngs=rngs)
        self.head = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x, seen):
        x = keep(seen, "bn1", self.bn1(keep(seen, "conv1", self.conv1(x))))
        x = keep(seen, "pool1", nnx.max_pool(keep(seen, "relu1", nnx.relu(x)), (2, 2), (2, 2)))
        x = keep(seen, "bn2", self.bn2(keep(seen, "conv2", self.conv2(x))))
        x = keep(seen, "pool2", keep(seen, "relu2", nnx.relu(x)).mean((1, 2)))
        return keep(seen, "head", self.head(x))


class NnxLSTMModule(nnx.Module):
    def __init__(self, rngs):
        self.rnn = nnx.RNN(nnx.LSTMCell(8, WIDTH, rngs=rngs), return_carry=True, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 10, rngs=rngs)

    def __call__(self, x, seen):
        (c, h), _ = self.rnn(x)
        keep(seen, "c", c)
        return keep(seen, "head", self.head(keep(seen, "h", h)))


NNX = {"cnn": NnxCNN, "lstm_module": NnxLSTMModule}


def layers_nnx(model: Any, batch: Any) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    logits = model(batch["x"], seen)
    return {**seen, "loss": cross_entropy(logits, batch["y"])}

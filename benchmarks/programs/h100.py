"""The optimizer's side of a step, as programs to compile for H100: in jaxmp, by hand, in flax and in optax."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

import jaxmp
from benchmarks.lib import trees
from benchmarks.programs.recipes import (
    LEARNING_RATE,
    MAX_NORM,
    Step,
    branched,
    by_hand,
    flax_dynamic_scale,
    plain,
    selected,
)

SMALL = 1024  # bytes: scalars and a few flags are below this, tensors above


class Tree(NamedTuple):
    """The params of a model."""

    name: str
    shapes: PyTree


GPT2 = Tree("GPT-2 small", trees.gpt2())
MANY = Tree("1000 leaves", trees.gpt2(layers=83))
LLAMA = Tree("Llama 1B", trees.llama_1b())


class Target(NamedTuple):
    """The most that a program may cost; every field is checked."""

    bytes_per_param: float
    small_all_reduces: int  # for flags and sums, each at most SMALL bytes
    rounded_leaves: int = 0  # leaves whose rounding to 16 bits must be in the program
    kernels: int | None = None
    largest_copy_bytes: int = SMALL
    stored_bytes_per_param: float | None = None  # params and optimizer state


class Program(NamedTuple):
    """One row of the table."""

    name: str
    mode: str  # the number of devices, and how they share the work
    step: Step
    init: Callable[[PyTree], Any]  # from float32 params
    devices: int = 1
    params_dtype: Any = jnp.float16
    target: Target | None = None
    tree: Tree = GPT2
    writes_params_only: bool = False  # its kernels have the params as operands, but never read them
    masters: str = ""  # of the table of masters: what holds the other bits of a param
    clips: bool = True

    @property
    def row(self) -> str:
        """The name of its row."""
        return f"{self.name}, {self.tree.name}, {self.mode}"


def jaxmp_programs() -> Iterator[Program]:
    """`jaxmp.mixed_precision` in its two forms, on one device and on eight that hold the same params."""
    inner = optax.chain(jaxmp.clip_by_global_norm(MAX_NORM), optax.adamw(LEARNING_RATE))
    tx = jaxmp.mixed_precision(inner, "fp16")

    def update(params: PyTree, opt_state: Any, grads: PyTree) -> tuple[PyTree, Any]:
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    forms = (
        ("jaxmp.apply_gradients", applied(tx), 30.5, 0),
        ("jaxmp update + optax.apply_updates", update, 32.5, len(jax.tree.leaves(GPT2.shapes))),
    )
    for name, step, limit, rounded in forms:
        # No more launches than the recipe by hand.
        yield Program(name, "1 device", step, tx.init, target=Target(limit, 0, rounded, kernels=405))
        yield Program(name, "8, jit", step, tx.init, devices=8, target=Target(limit, 0, rounded))
        yield Program(name, "8, shard_map", step, tx.init, devices=8, target=Target(limit, 1, rounded))


def fused_programs() -> Iterator[Program]:
    """`jaxmp.fused_adamw` in a few launches: with masters, with split masters, and with moments in 8 bits."""
    name = "jaxmp.fused_adamw, fp16"
    tx = jaxmp.mixed_precision(_fused_adamw(), "fp16")
    one = Program(name, "1 device", applied(tx), tx.init, writes_params_only=True)
    few = Target(30.5, 0, kernels=32, largest_copy_bytes=4)
    yield one._replace(target=few)
    # 4 more: XLA writes the mean over devices, and the kernel reads it.
    yield one._replace(mode="8, shard_map", devices=8, target=Target(34.5, 1))
    # Where devices share the arrays under plain jit, XLA computes what the kernel does. Of split leaves, two sums are
    # reduced: norm with flag, saturated weights.
    by_xla = one._replace(mode="8, jit", devices=8, writes_params_only=False, target=Target(34.5, 0))
    yield by_xla
    yield by_xla._replace(mode="8, jit, split", tree=LLAMA, target=Target(34.5, 2))
    yield one._replace(tree=MANY, target=few._replace(kernels=None))
    yield one._replace(tree=LLAMA, target=few)

    tx = jaxmp.mixed_precision(_fused_adamw(), "bf16", remainder_bits=16)
    name = "jaxmp.fused_adamw, bf16, 16 bits of remainder"
    split = Program(name, "1 device", applied(tx), tx.init, params_dtype=jnp.bfloat16)
    yield split._replace(target=few._replace(bytes_per_param=28.5))

    tx = jaxmp.mixed_precision(_fused_adamw(state_dtype=jnp.int8), "bf16", remainder_bits=8)
    name = "jaxmp.fused_adamw, bf16, 8 bits of remainder, int8 moments"
    small = split._replace(name=name, step=applied(tx), init=tx.init)
    small = small._replace(target=few._replace(bytes_per_param=14.5, stored_bytes_per_param=7.0))
    yield small
    yield small._replace(tree=LLAMA)
    yield small._replace(mode="8, jit", devices=8, target=Target(18.5, 0, largest_copy_bytes=2**20))


def _fused_adamw(**kwargs: Any) -> optax.GradientTransformation:
    return jaxmp.fused_adamw(LEARNING_RATE, max_norm=MAX_NORM, **kwargs)


# Of each kind of master: the policy, its options, and the least bytes per param that a step moves and stores. AdamW
# reads the gradient twice, and reads and writes two float32 moments and all parts of the param. It reads no param that
# has a float32 master.
MASTERS = {
    "float32 params": ("fp32", {}, 32.0, 12.0),
    "float32 masters": ("bf16", {}, 30.0, 14.0),
    "16 bits of remainder": ("bf16", {"remainder_bits": 16}, 28.0, 12.0),
    "8 bits of remainder": ("bf16", {"remainder_bits": 8}, 26.0, 11.0),
}


def programs_by_master() -> Iterator[Program]:
    """optax's AdamW and `jaxmp.fused_adamw` with each kind of master, with clipping and without."""
    clipped = optax.chain(jaxmp.clip_by_global_norm(MAX_NORM), optax.adamw(LEARNING_RATE))
    inner = {
        ("optax.adamw", False): optax.adamw(LEARNING_RATE),
        ("optax.adamw", True): clipped,
        ("jaxmp.fused_adamw", False): jaxmp.fused_adamw(LEARNING_RATE),
        ("jaxmp.fused_adamw", True): _fused_adamw(),
    }
    for masters, (policy, options, moved, stored) in MASTERS.items():
        for (name, clips), optimizer in inner.items():
            tx = jaxmp.mixed_precision(optimizer, policy, **options)
            yield Program(
                f"{name}, {masters}{', clipping' * clips}",
                "1 device",
                applied(tx),
                tx.init,
                params_dtype=jnp.float32 if policy == "fp32" else jnp.bfloat16,
                target=Target(moved + 0.5, 0, stored_bytes_per_param=stored + 0.1),
                writes_params_only="fused" in name and masters == "float32 masters",
                masters=masters,
                clips=clips,
            )


def applied(tx: optax.GradientTransformation) -> Step:
    """A step through `jaxmp.apply_gradients`."""

    def step(params: PyTree, opt_state: Any, grads: PyTree) -> tuple[PyTree, Any]:
        return jaxmp.apply_gradients(tx, grads, opt_state, params)

    return step


def baseline_programs() -> Iterator[Program]:
    """The same work without jaxmp."""
    adamw = optax.adamw(LEARNING_RATE)
    clipped = optax.chain(optax.clip_by_global_norm(MAX_NORM), adamw)
    for how, taken_if in (("select", selected), ("branch", branched)):
        init, step = by_hand(taken_if)
        one = Program(f"by hand, {how}: fp16 params, fp32 masters, clip, adamw", "1 device", step, init)
        for tree in (GPT2, MANY, LLAMA):
            yield one._replace(tree=tree)
    for name, tx in (("adamw", adamw), ("clip + adamw", clipped)):
        init, step = flax_dynamic_scale(tx)
        yield Program(f"flax DynamicScale, f32 params, {name}", "1 device", step, init, params_dtype=jnp.float32)
    for name, tx in (("adamw", adamw), ("clip + adamw", clipped)):
        init, step = plain(tx)
        yield Program(f"optax.{name}, f32, no scaling", "1 device", step, init, params_dtype=jnp.float32)

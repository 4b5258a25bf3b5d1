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


GPT2 = trees.gpt2()  # the params of all programs


class Target(NamedTuple):
    """The most that a program may cost; every field is checked.

    The optimizer's side of a step does a few operations for each byte, so its bytes are its time. One that checks all
    gradients before it changes anything reads each twice, and reads and writes the param's parts and two moments: 30
    bytes with float32 masters (2 more if optax's updates are added to the old param), 28 with 16 bits of remainder, 26
    with 8, and 14 with moments in 8 bits.
    """

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
    writes_params_only: bool = False  # its kernels have the params as operands, but never read them
    masters: str = ""  # of the table of masters: what holds the other bits of a param
    clips: bool = True

    @property
    def row(self) -> str:
        """The name of its row."""
        return f"{self.name}, GPT-2 small, {self.mode}"


def jaxmp_programs() -> Iterator[Program]:
    """`jaxmp.mixed_precision` in its two forms, on one device and on eight that hold the same params."""
    inner = optax.chain(jaxmp.clip_by_global_norm(MAX_NORM), optax.adamw(LEARNING_RATE))
    tx = jaxmp.mixed_precision(inner, "fp16")

    forms = (
        ("jaxmp.apply_gradients", applied(tx), 30.5, 0),
        ("jaxmp update + optax.apply_updates", plain(tx)[1], 32.5, len(jax.tree.leaves(GPT2))),
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
    # Where devices share the arrays under plain jit, XLA computes what the kernel does.
    yield one._replace(mode="8, jit", devices=8, writes_params_only=False, target=Target(34.5, 0))

    tx = jaxmp.mixed_precision(_fused_adamw(), "bf16", remainder_bits=16)
    name = "jaxmp.fused_adamw, bf16, 16 bits of remainder"
    split = Program(name, "1 device", applied(tx), tx.init, params_dtype=jnp.bfloat16)
    yield split._replace(target=few._replace(bytes_per_param=28.5))

    tx = jaxmp.mixed_precision(_fused_adamw(state_dtype=jnp.int8), "bf16", remainder_bits=8)
    name = "jaxmp.fused_adamw, bf16, 8 bits of remainder, int8 moments"
    small = split._replace(name=name, step=applied(tx), init=tx.init)
    small = small._replace(target=few._replace(bytes_per_param=14.5, stored_bytes_per_param=7.0))
    yield small
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
        yield Program(f"by hand, {how}: fp16 params, fp32 masters, clip, adamw", "1 device", step, init)
    for title, recipe in (
        ("flax DynamicScale, f32 params, {}", flax_dynamic_scale),
        ("optax.{}, f32, no scaling", plain),
    ):
        for name, tx in (("adamw", adamw), ("clip + adamw", clipped)):
            init, step = recipe(tx)
            yield Program(title.format(name), "1 device", step, init, params_dtype=jnp.float32)

"""The module that an equation comes from: paths such as `Block_0/Dense_1`, from its name stack.

A jaxpr keeps nothing of modules, except for the name stack of each equation: named scopes, wrapped by transformations
(`jvp(vmap(Net))/Dense_0`). Flax writes the names of its modules there, but the root has the name of its class, and
methods other than `__call__` add their own names. So while `taps` traces a function, or autocast chooses operations of
one, each call of a module writes a marker with the path of its params, `jaxmp.module(Block_0/Dense_1)`, for autocast
`jaxmp.chosen(Block_0/Dense_1)`, which does not stay in the program. A marker replaces everything to the left of it; a
named scope to the right of it is a part of the module; the root's path is "".
"""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import jax

_MARKER = re.compile(r"(?:\w+\()*jaxmp\.(?:module|chosen)\(([^()]*)\)\)*")
_CHOSEN = re.compile(r"(?:\w+\()*jaxmp\.chosen\(([^()]*)\)\)*")
# Regions of autocast are scopes too, `jaxmp.autocast(float16)`, and no modules.
REGION = "jaxmp.autocast"
REGIONS = re.compile(re.escape(REGION) + r"\(([^()]*)\)")
# And so are regions of fp8: `jaxmp.fp8(off)`.
FP8 = "jaxmp.fp8"
_FP8_REGIONS = re.compile(re.escape(FP8) + r"\((on|off)\)")
_WRAPPED = re.compile(r"\w+\(([^()]*)\)")  # by a transformation, perhaps several scopes: jvp(block_0/up)

# A part of the key under which `jax.jit` caches what it traced: with markers it is another program.
_KEY = jax.make_user_context(None)


@contextlib.contextmanager
def marking() -> Iterator[None]:
    """The trace of a function whose modules leave markers; jitted functions are traced anew in it."""
    with _KEY("jaxmp.module"):
        yield


def marker(path: str, kind: str = "module") -> contextlib.AbstractContextManager[Any]:
    """The scope of a call of the module at `path`, the path of its params; "" for the root."""
    return jax.named_scope(f"jaxmp.{kind}({path})")


def join(outer: str, inner: str) -> str:
    """The name stack of an equation in a function that is called under `outer`."""
    return "/".join(part for part in (outer, inner) if part)


def without_regions(stack: str) -> str:
    """A name stack without the scopes of regions."""
    return _FP8_REGIONS.sub("", REGIONS.sub("", stack))


def without_chosen(stack: str) -> str:
    """A name stack without the markers that autocast reads."""
    return "/".join(part for part in _CHOSEN.sub("", stack).split("/") if part)


def fp8_region(enabled: bool) -> contextlib.AbstractContextManager[Any]:
    """The scope of a region of fp8, for what is read off a jaxpr later."""
    return jax.named_scope(f"{FP8}({'on' if enabled else 'off'})")


def is_without_fp8(stack: str) -> bool:
    """Whether the innermost region of fp8 in a name stack switches it off."""
    return _FP8_REGIONS.findall(stack)[-1:] == ["off"]


def is_backward(stack: str) -> bool:
    """Whether an equation under this name stack is a part of a derivative."""
    return "transpose(" in stack


def chain(stack: str, base: str = "") -> tuple[str, ...]:
    """Paths of the modules and scopes in a name stack, outermost first; `base` is the path it begins at.

    The name stack of an equation in a nested function begins at that function.
    """
    stack, start = without_regions(stack), 0
    parts: list[str] = []
    for match in _MARKER.finditer(stack):
        # The scope right before a marker is flax's own name for the module.
        parts += _extended(base, _scopes(stack[start : match.start()])[:-1])
        base, start = match[1], match.end()
        parts.append(base)
    parts += _extended(base, _scopes(stack[start:]))
    return tuple(dict.fromkeys(path for path in parts if path))


def path_of(stack: str) -> str:
    """The innermost module or scope of a name stack; "" at the top."""
    return (chain(stack) or ("",))[-1]


def _scopes(text: str) -> list[str]:
    while (unwrapped := _WRAPPED.sub(r"\1", text)) != text:
        text = unwrapped
    # Beside a marker, a parenthesis may have lost its other one.
    parts = (re.sub(r"^(?:\w+\()+", "", part) for part in text.split("/"))
    parts = (part if "(" in part else part.rstrip(")") for part in parts)
    return [part for part in parts if part and part != "rematted_computation"]


def _extended(base: str, scopes: list[str]) -> list[str]:
    return [join(base, "/".join(scopes[: i + 1])) for i in range(len(scopes))]

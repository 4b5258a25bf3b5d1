"""The order in which the call of a flax.nnx module uses its parts, read from the code of the call.

nnx modules are put into fp8 before they run, so their order of calls is not known by a trace. The attributes of an
object lie in the order in which they were set, which may be another one: a head that was declared first is called last.
So this file reads the Python code of `__call__`: arguments are evaluated before the call, methods of the same class
count where they are called, a list counts as its items in their order.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from typing import Any

from flax import nnx


def calls(module: nnx.Module, kinds: tuple[type, ...]) -> Iterator[nnx.Module]:
    """The modules of these kinds in `module` in the order in which its call uses them, each as often as it does.

    The parts of a module whose code cannot be read, or does not show a use of each of them, come in the order in which
    its attributes were set.
    """
    yield from _of(module, kinds, ())


def _of(node: Any, kinds: tuple[type, ...], around: tuple[Any, ...]) -> Iterator[nnx.Module]:
    if isinstance(node, kinds):
        yield node
    elif isinstance(node, nnx.Module):
        if not any(node is outer for outer in around):
            for part in _parts(node, kinds, (*around, node)):
                yield from _of(part, kinds, (*around, node))
    elif isinstance(node, dict):
        for part in node.values():
            yield from _of(part, kinds, around)
    elif isinstance(node, (list, tuple, nnx.List)):
        for part in node:
            yield from _of(part, kinds, around)


def _parts(module: nnx.Module, kinds: tuple[type, ...], around: tuple[Any, ...]) -> list[Any]:
    """The attributes that hold modules of these kinds, in the order of their uses."""
    found = {name: part for name, part in vars(module).items() if not name.startswith("_pytree__")}
    own = {name: part for name, part in found.items() if any(_of(part, kinds, around))}
    uses = [name for name in _Uses.of(type(module), "__call__") if name in own]
    return [own[name] for name in (uses if set(uses) == set(own) else own)]


class _Uses(ast.NodeVisitor):
    """The attributes of `self` that a method uses, in the order of evaluation."""

    def __init__(self, cls: type, around: tuple[str, ...]):
        self.cls, self.around = cls, around
        self.found: list[str] = []
        self.own_name = "self"

    @classmethod
    def of(cls, owner: type, method: str, around: tuple[str, ...] = ()) -> list[str]:
        """The names; empty if there is no such method or its code cannot be read."""
        function = inspect.unwrap(getattr(owner, method, None) or int)
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
        except (OSError, TypeError, SyntaxError):
            return []
        if not isinstance(tree, ast.FunctionDef) or not tree.args.args:
            return []
        uses = cls(owner, (*around, method))
        uses.own_name = tree.args.args[0].arg
        for statement in tree.body:
            uses.visit(statement)
        return uses.found

    def visit_Call(self, node: ast.Call) -> None:
        for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
            self.visit(argument)
        self.visit(node.func)

    def visit_For(self, node: ast.For) -> None:
        for part in (node.iter, *node.body, *node.orelse):
            self.visit(part)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if not isinstance(node.value, ast.Name) or node.value.id != self.own_name:
            self.generic_visit(node)
        elif inspect.isfunction(getattr(self.cls, node.attr, None)) and node.attr not in self.around:
            self.found += self.of(self.cls, node.attr, self.around)
        else:
            self.found.append(node.attr)

"""The page of all errors: the message of each `raise` in the packages, read off the sources, by room."""

import ast
import html
from collections.abc import Iterator
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
PAGE = "errors.md"
GAP = "…"  # in place of what a message takes from the call


def text_of(node: ast.expr, constants: dict[str, ast.expr]) -> str:
    """A message, with a gap for each value; a gap alone if it is made elsewhere."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part, constants) for part in node.values)
    if isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.Name):
        return text_of(node.value, constants)
    if isinstance(node, ast.Name) and node.id in constants:
        return text_of(constants[node.id], {name: value for name, value in constants.items() if name != node.id})
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left, constants) + text_of(node.right, constants)
    return GAP


def errors_of(source: str) -> Iterator[tuple[str, str]]:
    """(class, message) of each `raise` whose message stands in the source."""
    tree = ast.parse(source)
    assigned = [
        node for node in ast.walk(tree) if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    ]
    constants = {node.targets[0].id: node.value for node in assigned}
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            text = text_of(node.exc.args[0], constants)
            if text.strip(f"{GAP} .:"):
                yield ast.unparse(node.exc.func).rpartition(".")[2], text


def errors() -> dict[str, list[tuple[str, str]]]:
    """The errors of each room, in the order of their messages."""
    found: dict[str, set[tuple[str, str]]] = {}
    for folder in ("jaxmp/_src", "pallas_kernels"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            room = path.relative_to(ROOT / folder).parts[0] if folder == "jaxmp/_src" else folder
            found.setdefault(room, set()).update(errors_of(path.read_text()))
    return {room: sorted(rows, key=lambda row: row[1].lower()) for room, rows in sorted(found.items()) if rows}


def page_text() -> str:
    """The page."""
    lines = [
        "---\nhide:\n  - toc\nsearch:\n  boost: 0.2\n---\n\n# Errors",
        "",
        f"Every error message of jaxmp, by the part that raises it; {GAP} stands for what the message takes from your "
        "call: a path, a shape, a dtype. A message says the rule, what was got, and the fix. This page is made from "
        "the sources. Warnings have [a page of their own](warnings.md); for symptoms without a message see "
        "[debugging](how-to/trouble/debugging.md).",
        "",
    ]
    for room, rows in errors().items():
        lines += [f"## {room}", "", "| error | message |", "|---|---|"]
        for error, message in rows:
            cell = html.escape(" ".join(message.split()), quote=False).replace("|", "\\|")
            lines.append(f"| {error} | {_plain(cell)} |")
        lines.append("")
    return "\n".join(lines)


def _plain(text: str) -> str:
    """No character of it means anything to Markdown."""
    return "".join(f"&#{ord(c)};" if c in "*_`[]{}~^#" else c for c in text)


def on_files(files, config):
    """Adds the page."""
    files.append(File.generated(config, PAGE, content=page_text()))
    return files

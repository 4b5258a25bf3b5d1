"""What is public, and on which page of the reference it stands. Read from the sources, without importing them.

Public is what `jaxmp/__init__.py` and `pallas_kernels/__init__.py` hand on, and what the modules among it define or
hand on in turn (`from x import name as name`). Names of `jaxmp` itself are sorted into pages by the file that defines
them; one from a file that no page names comes on the last page, and a module gets a page of its own.
"""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Page, title, and the files whose names it has.
TOPICS = (
    ("step", "The training step", ("transform", "grads", "policy", "reduce", "sync", "_sharding_of")),
    ("scaling", "Loss scales", ("scaling", "shared", "grad_scaler")),
    ("state", "State and metrics", ("state", "_states", "unscale", "master")),
    ("autocast", "Autocast and policies by measure", ("_autocast", "_explain", "_fp16_methods", "_suggest")),
    ("optimizers", "Optimizers", ("fused", "clip", "compress", "masterless", "ema", "_convert")),
    ("numerics", "Numerical safety", ("probe", "_softmax", "_scale_gradient")),
    ("more", "More", ()),
)


def source_of(module: str) -> Path:
    """The file of a module."""
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def exports_of(module: str) -> dict[str, str]:
    """The public names of a module: each with the module that defines it."""
    found = {}
    for node in ast.parse(source_of(module).read_text()).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if alias.asname == alias.name:
                    found[alias.name] = node.module
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = module
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    found[target.id] = module
    return {name: origin for name, origin in found.items() if not name.startswith("_")}


def namespaces() -> list[str]:
    """The modules that are public by themselves: `jaxmp.fp8` and its like, and `pallas_kernels`."""
    inner = [f"jaxmp.{name}" for name, origin in exports_of("jaxmp").items() if origin == "jaxmp"]
    return [*sorted(inner), "pallas_kernels"]


@functools.cache
def pages() -> dict[str, tuple[str, list[str]]]:
    """Each page of the reference: its title, and its names in full."""
    found = {page: (title, []) for page, title, _ in TOPICS}
    page_of = {f"jaxmp.{file}": page for page, _, files in TOPICS for file in files}
    names = {name: origin for name, origin in exports_of("jaxmp").items() if origin != "jaxmp"}
    for name in sorted(names, key=lambda name: [*page_of, names[name]].index(names[name])):
        found[page_of.get(names[name], TOPICS[-1][0])][1].append(f"jaxmp.{name}")
    found = {page: (title, names) for page, (title, names) in found.items() if names}
    for module in namespaces():
        names = [f"{module}.{name}" for name in exports_of(module)]
        found[module.removeprefix("jaxmp.")] = (module, names)
    return found

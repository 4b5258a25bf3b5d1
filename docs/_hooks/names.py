"""The public names, and the page of the reference for each. Read from the sources, without importing them.

The public names are those that the faces import (`from x import name as name`). The faces are `jaxmp/__init__.py`, the
modules beside it, and `pallas_kernels/__init__.py`. A name of a face such as `jaxmp.fp8` is on the page of this face. A
name of `jaxmp` itself is on the page of the room that defines it: `jaxmp._src.step.policy` belongs to the room `step`,
and a function that the room `guard` wraps to the room where it is written. So a new public name, a new room and a new
face each get their place without a change here. `FIRST` says what a reader looks for first.
"""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = "jaxmp._src."

# The order of the pages and their titles. A room that is missing here comes after these, under its own name.
TITLES = {
    "step": "The training step",
    "guard": "Checks of a run",
    "loss_scale": "Loss scales",
    "autocast": "Autocast",
    "transforms": "Optimizers, clipping, averages",
    "distributed": "Gradients over devices",
    "devices": "Devices",
    "numerics": "Numerics for models",
    "precision_search": "Precision search",
    "porting": "Porting",
}

# The names that begin a page, in this order. The page of `autocast` also has those that the room `step` defines,
# because they take a policy.
FIRST = {
    "step": ("mixed_precision", "value_and_grad", "apply_gradients", "get_policy", "get_metrics", "get_master_params"),
    "autocast": ("autocast", "explain_autocast", "no_autocast"),
    "fp8": ("autocast", "DelayedScaling", "CurrentScaling", "calibrate", "get_scales", "get_amaxes"),
    "checkpoint": ("manager", "save_job", "restore_job", "save", "restore"),
    "monitor": ("Monitor", "step_stats", "log_metrics", "first_bad_op"),
    "nnx": ("Optimizer", "value_and_grad", "to_fp8"),
    "memory": ("plan", "Plan", "overview"),
}


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
                    found[alias.name] = written_in(node.module, alias.name)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = module
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    found[target.id] = module
    return {name: origin for name, origin in found.items() if not name.startswith("_")}


@functools.cache
def written_in(module: str, name: str) -> str:
    """The module of a public function with its docstring, if `module` wraps it by `name = guarded(other.name)`.

    Or by `functools.wraps(other.name)`; else `module` itself.
    """
    body = ast.parse(source_of(module).read_text()).body if module.startswith(ROOMS) else []
    modules = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for node in body:
        calls = getattr(node, "decorator_list", [])
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call):
            calls = [node.value]
        is_it = name in (getattr(node, "name", None), *map(ast.unparse, getattr(node, "targets", [])))
        for call in calls if is_it else []:
            for given in call.args if isinstance(call, ast.Call) else []:
                other, _, own = ast.unparse(given).rpartition(".")
                if own == name and other in modules:
                    return modules[other]
    return module


def namespaces() -> list[str]:
    """The modules that are public by themselves: `jaxmp.fp8` and its like, and `pallas_kernels`."""
    inner = [f"jaxmp.{name}" for name, origin in exports_of("jaxmp").items() if origin == "jaxmp"]
    return [*sorted(inner), "pallas_kernels"]


def room_of(module: str) -> str:
    """The room of a module: `step` for `jaxmp._src.step.policy`."""
    return module.removeprefix(ROOMS).partition(".")[0]


def summary_of(room: str) -> str:
    """What the room is for, in one line; empty for a face that has no room of its name."""
    source = ROOT / "jaxmp" / "_src" / room / "__init__.py"
    return (ast.get_docstring(ast.parse(source.read_text())) or "") if source.is_file() else ""


def first_line(name: str) -> str:
    """The first line of the docstring of a public name; empty for one that has none, such as a constant."""
    module, _, attribute = name.rpartition(".")
    origin = exports_of(module).get(attribute, module)
    for node in ast.parse(source_of(origin).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == attribute and ast.get_docstring(node):
            return (ast.get_docstring(node) or "").partition("\n")[0]  # not of its overloads, which have none
    return ""


@functools.cache
def pages() -> dict[str, tuple[str, list[str]]]:
    """Each page of the reference: its title, and its names in full.

    A room and a face of the same name (`checkpoint`) share one page. What a face and `jaxmp` both hand on is
    listed once, as a name of `jaxmp`.
    """
    found, of_jaxmp = {room: (title, []) for room, title in TITLES.items()}, exports_of("jaxmp")
    for module in namespaces():
        names = [f"{module}.{name}" for name, origin in exports_of(module).items() if of_jaxmp.get(name) != origin]
        found[module.removeprefix("jaxmp.")] = (module, names)
    for name, origin in of_jaxmp.items():
        if origin.startswith(ROOMS):
            room = "autocast" if name in FIRST["autocast"] else room_of(origin)
            found.setdefault(room, (room, []))[1].append(f"jaxmp.{name}")
    for page, (_, names) in found.items():
        order = {name: place for place, name in enumerate(FIRST.get(page, ()))}
        names.sort(key=lambda name: order.get(name.rpartition(".")[2], len(order)))
    return {page: (title, names) for page, (title, names) in found.items() if names}

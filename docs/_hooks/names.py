"""The public names, and the page of the reference for each. Read from the sources, without importing them.

The public names are those that the faces import (`from x import name as name`). The faces are `jaxmp/__init__.py`, the
modules beside it, and `pallas_kernels/__init__.py`. A name of a face such as `jaxmp.fp8` is on the page of this face. A
name of `jaxmp` itself is on the page of the room that defines it: `jaxmp._src.step.policy` belongs to the room `step`.
So a new public name, a new room and a new face each get their place without a change here. `GROUPS` says what names of
a page are for.

A class that only comes out of a function, such as the statistics of `step_stats`, is no public name. The reference
shows it below the function (`results`).
"""

import ast
import functools
import itertools
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ROOMS = "jaxmp._src."

# The order of the pages and their titles. A room that is missing here comes after these, under its own name.
TITLES = {
    "step": "The training step",
    "loss_scale": "Loss scales",
    "autocast": "Autocast",
    "transforms": "Optimizers, clipping, averages",
    "distributed": "Gradients over devices",
    "devices": "Devices",
    "numerics": "Numerics for models",
    "porting": "Porting",
}

# What a reader looks for on a page: groups of names by what they are for, in this order. Names that are in no group
# come last. The page of `autocast` also has those that the room `step` defines, because they take a policy.
GROUPS: dict[str, dict[str, tuple[str, ...]]] = {
    "step": {
        "A step": ("mixed_precision", "value_and_grad", "apply_gradients"),
        "Policies": ("get_policy", "Policy", "weight_decay_mask"),
        "Reading the state": ("get_metrics", "get_master_params", "get_loss_scale", "unscale"),
        "State beside the optimizer": ("keep_if_skipped", "reload_master_params"),
        "Parts that work alone": ("unscale_and_skip", "keep_master_params", "shared_loss_scale"),
        "Checks of a run": ("check_progress", "TrainingStuck", "UnreadLossScale"),
    },
    "autocast": {"": ("autocast", "explain_autocast", "no_autocast")},
    "transforms": {
        "Fused optimizers": ("fused_adamw", "fused_lion", "fused_sgd"),
        "Small state": ("compress_moments", "float32_moments", "stochastic_round_updates"),
        "Averages of the weights": ("ema_params", "get_ema_params"),
        "Norms and clipping": ("clip_by_global_norm", "global_norm", "count_zeros"),
    },
    "fp8": {
        "Recipes": (
            *("DelayedScaling", "CurrentScaling", "RowwiseScaling", "BlockScaling", "MXFP8", "NVFP4", "Int8"),
            "backends",
        ),
        "Layers of a model": ("autocast", "promote_all_but_kernel", "save_quantized", "freeze", "FallbackWarning"),
        "Products of your own": ("dot_general", "einsum", "ragged_dot", "Scales"),
        "Scales of a run": ("calibrate", "get_scales", "get_amaxes", "is_scale", "with_scales", "resize_history"),
        "Numbers": ("quantize", "dequantize"),
    },
    "checkpoint": {
        "Save and restore": ("manager", "save", "restore", "read_metadata"),
        "Another precision": ("convert", "set_loss_scale"),
        "Other libraries": (
            *("save_safetensors", "load_safetensors", "import_megatron", "import_loss_scale", "export_loss_scale"),
        ),
    },
    "monitor": {
        "Statistics inside a step": ("step_stats", "tensor_stats", "watch_activations"),
        "Watching a run": ("Monitor", "LiveMonitor", "MonitorWarning", "log_metrics"),
        "Pictures": ("plot_loss_and_scale", "plot_exponents", "plot_layers", "plot_fp8"),
        "What is not finite": ("first_nonfinite", "first_bad_op"),
    },
    "nnx": {
        "A step": ("Optimizer", "value_and_grad", "cast_to_param", "snapshot", "restore_if_skipped"),
        "fp8": ("to_fp8", "Fp8DotGeneral", "Fp8RaggedDot", "Fp8Scale"),
    },
    "memory": {"": ("plan", "compiled")},
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
            room = "autocast" if name in GROUPS["autocast"][""] else room_of(origin)
            found.setdefault(room, (room, []))[1].append(f"jaxmp.{name}")
    for page, (_, names) in found.items():
        order = {name: place for place, name in enumerate(itertools.chain(*GROUPS.get(page, {}).values()))}
        names.sort(key=lambda name: order.get(name.rpartition(".")[2], len(order)))
    return {page: (title, names) for page, (title, names) in found.items() if names}


def groups_of(page: str, listed: list[str]) -> list[tuple[str, list[str]]]:
    """The names of a page by what they are for; without a title where there is one group only."""
    titles = {name: title for title, names in GROUPS.get(page, {}).items() for name in names}
    found: dict[str, list[str]] = {}
    for name in listed:
        found.setdefault(titles.get(name.rpartition(".")[2], "Others" if any(titles.values()) else ""), []).append(name)
    return list(found.items())


def class_of(module: str, name: str) -> tuple[str, ast.ClassDef] | None:
    """The class that a module of `jaxmp` calls `name`: its path in full and its code; None if it is none of ours."""
    if not module.startswith(ROOMS):
        return None
    for node in ast.parse(source_of(module).read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return f"{module}.{name}", node
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("jaxmp"):
            for alias in node.names:
                known_as = alias.asname or alias.name
                if known_as == name:
                    return class_of(node.module, alias.name)
                if name.startswith(f"{known_as}."):
                    return class_of(f"{node.module}.{alias.name}", name.removeprefix(f"{known_as}."))
    return None


def named_in(annotations: list[ast.expr | None]) -> list[str]:
    """The names in annotations, also within strings."""
    found = []
    for annotation in annotations:
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode="eval").body
        found += [ast.unparse(x) for x in ast.walk(annotation or ast.Pass()) if isinstance(x, ast.Name | ast.Attribute)]
    return found


@functools.cache
def results() -> dict[str, list[str]]:
    """By public name: the documented classes that it returns, or that their fields hold, if they are no public names.

    Each class in full, once.
    """
    listed = [name for _, names in pages().values() for name in names]
    public = {f"{origin}.{name.rpartition('.')[2]}" for name, origin in map(_with_origin, listed)}
    found: dict[str, list[str]] = {}

    def add(name: str, module: str, annotations: list[ast.expr | None]) -> None:
        for said in named_in(annotations):
            path, node = class_of(module, said) or ("", None)
            known = path in public or any(path in paths for paths in found.values())
            if node is not None and not known and "Attributes:" in (ast.get_docstring(node) or ""):
                found.setdefault(name, []).append(path)
                fields = [field.annotation for field in node.body if isinstance(field, ast.AnnAssign)]
                add(name, path.rpartition(".")[0], fields)

    for name, origin in map(_with_origin, listed):
        for node in ast.parse(source_of(origin).read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name.rpartition(".")[2]:
                if isinstance(node, ast.FunctionDef):
                    add(name, origin, [node.returns])
                else:  # what its docstring names, of all that its methods return
                    made = named_in([x.returns for x in node.body if isinstance(x, ast.FunctionDef)])
                    said = ast.get_docstring(node) or ""
                    add(name, origin, [ast.Name(x) for x in made if f"`{x}`" in said])
    return found


def _with_origin(name: str) -> tuple[str, str]:
    """A public name, and the module that defines it."""
    module, _, attribute = name.rpartition(".")
    return name, exports_of(module)[attribute]

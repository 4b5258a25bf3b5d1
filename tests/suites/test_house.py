"""House rules that import-linter cannot check: faces define nothing, rooms are private, no state is hidden."""

import ast

import pytest

from helpers import ROOT

PACKAGE = ROOT / "jaxmp"
FACES = sorted(path for path in PACKAGE.glob("*.py") if path.stem not in ("__init__", "__main__"))
ROOMS = sorted(path for path in (PACKAGE / "_src").iterdir() if path.is_dir() and path.name != "__pycache__")
FILES = sorted((PACKAGE / "_src").rglob("*.py"))


def body_of(path):
    """The statements of a file, without its docstring."""
    tree = ast.parse(path.read_text())
    assert ast.get_docstring(tree), f"{path} has no docstring"
    return tree.body[1:]


def test_the_package_shows_faces_and_the_rooms_only():
    names = {path.name for path in PACKAGE.iterdir() if path.name != "__pycache__"}
    assert names == {path.name for path in FACES} | {"__init__.py", "__main__.py", "_src", "py.typed"}


@pytest.mark.parametrize("face", FACES, ids=lambda path: path.stem)
def test_a_face_only_hands_names_on(face):
    for node in body_of(face):
        assert isinstance(node, ast.ImportFrom), f"{face.name}:{node.lineno} is no import"
        assert all(name.asname == name.name for name in node.names), f"{face.name}:{node.lineno}"


def test_rooms_are_a_docstring_and_files_without_underscore():
    for room in ROOMS:
        assert body_of(room / "__init__.py") == [], room
    assert [path for path in FILES if path.name.startswith("_") and path.name != "__init__.py"] == []


def test_one_file_holds_the_context_variable_of_the_package():
    assert [path.name for path in FILES if "ContextVar(" in path.read_text()] == ["ambient.py"]


def test_no_module_holds_a_table_that_calls_fill():
    """An empty list, dict or set at the level of a module can only be there to be filled later."""
    makers = ("dict", "list", "set", "defaultdict", "deque", "OrderedDict", "WeakKeyDictionary", "WeakValueDictionary")

    def is_empty(value):
        if isinstance(value, ast.Call):
            name = getattr(value.func, "id", getattr(value.func, "attr", None))
            return name in makers and not value.args
        return isinstance(value, ast.List | ast.Dict | ast.Set) and not ast.unparse(value).strip("[]{} ")

    for path in FILES:
        for node in body_of(path):
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                assert not is_empty(node.value), f"{path.name}:{node.lineno}"


def test_no_file_reaches_into_private_jax():
    assert [path.name for path in FILES if "jax._src" in path.read_text().replace("jaxmp._src", "")] == []

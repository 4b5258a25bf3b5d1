"""Which cases of a test that is marked `thorough(n)` run: conftest.py, on a file of its own."""

import pytest

from helpers import ROOT

TESTS = """
import pytest

@pytest.mark.thorough(3)
@pytest.mark.parametrize("low", ["e4m3", "e5m2", "int8"])
@pytest.mark.parametrize(("way", "axis"), [("jit", 0), ("vmap", 0), ("scan", 1)], ids=["jit", "vmap", "scan"])
def test_stacked(low, way, axis): ...

@pytest.mark.thorough(1)
@pytest.mark.parametrize("case", ["a", "b::c"])
def test_other(case): ...

@pytest.mark.thorough(0)
def test_other_one(): ...

class TestClass:
    @pytest.mark.thorough(0)
    def test_method(self): ...

@pytest.mark.parametrize("case", ["here", pytest.param("left", marks=pytest.mark.thorough(0))])
def test_ordinary(case): ...
"""


FRESH = ["-p", "no:cacheprovider", "--import-mode=importlib"]  # of each test its own file, though all have one name


class Collected:
    """A plugin for a pytest inside of this one: what it collects, by the rules of the project."""

    def __init__(self, conftest):
        self.pytest_addoption = conftest.pytest_addoption
        self.pytest_collection_modifyitems = conftest.pytest_collection_modifyitems

    def pytest_collection_finish(self, session):
        self.names = [item.nodeid.partition("::")[2] for item in session.items]


@pytest.fixture
def collect(request, tmp_path, monkeypatch):
    """`collect(*arguments)`: names of the cases that pytest would run of `TESTS`."""
    (tmp_path / "test_these.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = thorough")
    monkeypatch.chdir(tmp_path)
    conftest = request.config.pluginmanager.get_plugin(str(ROOT / "conftest.py"))

    def collect(*arguments):
        collected = Collected(conftest)
        assert pytest.main(["--collect-only", "-qq", *FRESH, *arguments], [collected]) == 0
        return collected.names

    return collect


def test_the_cases_that_run_show_every_value_of_every_parameter(collect):
    names = collect()
    stacked = [name.removesuffix("]").partition("[")[2].split("-") for name in names if "stacked" in name]
    assert [sorted(values) for values in zip(*stacked, strict=True)] == [
        ["jit", "scan", "vmap"],
        ["e4m3", "e5m2", "int8"],
    ]
    assert names == collect("test_these.py")
    others = [name.partition("[")[0] for name in names if "stacked" not in name]
    assert others == ["test_other", "test_ordinary"]
    assert len(collect("--all")) == 9 + 2 + 1 + 1 + 2


@pytest.mark.parametrize("name", ["test_other", "test_other[b::c]", "TestClass", "TestClass::test_method"])
def test_a_name_takes_its_own_cases_and_none_of_other_tests(collect, tmp_path, name):
    own = {case for case in collect("--all") if case == name or case.startswith((f"{name}[", f"{name}::"))}
    assert own and set(collect(f"{tmp_path}/test_these.py::{name}")) == own
    assert set(collect(f"test_these.py::{name}", "test_these.py")) == own | set(collect())

"""What every test of this project runs under: eight simulated CPU devices and jax's strictest broadcasting.

This file stands at the root, not in tests/, so that the doctests of jaxmp/ run under the same rules, alone too
(`pytest jaxmp/policy.py`). The environment is set before jax is first imported and is inherited by the processes that
tests start and by the kernels of notebooks.

To run the suite on other devices, name the platform: `JAXMP_TEST_PLATFORM=cuda pytest`.
"""

import os
import platform
import sys

if "jax" in sys.modules:
    raise RuntimeError("jax was imported before conftest.py could choose its devices; find the pytest plugin that did")

os.environ["JAX_PLATFORMS"] = os.environ.get("JAXMP_TEST_PLATFORM") or "cpu"
# AVX has no FMA: a * b + c is rounded twice, whatever else is in its loop. No test needs that (`make portable` runs all
# with FMA, too); a test that does by mistake fails on no machine of a user. An instruction set in XLA_FLAGS stands.
os.environ["XLA_FLAGS"] = " ".join(
    ["--xla_cpu_max_isa=AVX"] * (platform.machine() in ("x86_64", "AMD64"))
    + [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in flag]
    + ["--xla_force_host_platform_device_count=8"]
)
# Simulated devices share the threads of few cores: two programs with collectives in flight can lock each other out.
os.environ["JAX_CPU_ENABLE_ASYNC_DISPATCH"] = "false"
# After each product NumPy's threads wait for the next one in a loop: 25 ms of another process's core.
os.environ["OPENBLAS_NUM_THREADS"] = "1"
# Broadcasting that adds axes must be written out: [d] + [b, d] raises.
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
# Without LLVM's optimizations, while tests are collected too. `pytest_runtest_protocol` turns them on for some tests.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"
# Each operation of a program would name the lines of Python that made it: 6 % of the time of these tests.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
# A cached program compiles nothing, so it would hide a second compilation: no persistent cache.
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)

import gc
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

if os.environ.get("JAXMP_TEST_COMPILERS"):
    sys.path.insert(0, os.path.join(os.path.dirname(__file__), "tests", "support"))
    import compilers

    compilers.vary(os.environ["JAXMP_TEST_COMPILERS"])

# Doctest would import them: scripts that recorded other systems need those systems, and naive loops train.
collect_ignore_glob = ["tests/oracles/*.py", "tests/support/naive_loops/*.py"]

# The first example of a property compiles: no deadline. Built on hypothesis's own profile, which knows CI.
hypothesis.settings.register_profile(
    "jaxmp", hypothesis.settings(), deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("jaxmp")


@pytest.fixture(autouse=True)
def nothing_was_said_before() -> Iterator[None]:
    """Forgets what jaxmp says once for a process, so that no test depends on those before it; nor on their mesh.

    Many tests make gradients themselves: reading a loss scale once says so (`jaxmp.UnreadLossScale`).
    """
    import jax

    import jaxmp
    from jaxmp._src.base import ambient

    ambient.now().autocast_reached.clear()
    jaxmp.get_loss_scale(())
    yield
    assert jax.sharding.get_abstract_mesh().empty, "a test must leave no mesh behind (jax.set_mesh)"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="every case, also of tests that are marked `thorough`")


def pytest_collection_finish() -> None:
    """Modules live to the end: the garbage collector need not walk through them again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Takes n of the cases that are marked `thorough(n)`: all with `--all`, and those that the command line names."""
    if config.getoption("all"):
        return
    arguments = [argument.partition("::") for argument in config.args]
    named = [(config.invocation_params.dir.joinpath(path).resolve(), name) for path, _, name in arguments if name]
    thorough = defaultdict(list)
    for item in items:
        marks = [mark.args[0] for mark in item.iter_markers("thorough")]
        if marks:
            name = getattr(item, "originalname", item.name)
            thorough[item.path, getattr(item, "cls", None), name, min(marks)].append(item)
    left_out = set()
    for (*_, n), cases in thorough.items():
        those_named = {case for case in cases if any(_is_named(case, *by) for by in named)}
        left_out |= set(cases) - _sample(cases, n) - those_named
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def _is_named(case: pytest.Item, path: Path, name: str) -> bool:
    """Whether `path::name` of the command line means this case: by its own name, or by that of its test or class."""
    own = case.nodeid.partition("::")[2]
    return case.path == path and (own == name or own.startswith((f"{name}[", f"{name}::")))


def _sample(cases: list[pytest.Item], n: int) -> set[pytest.Item]:
    """`n` cases of a test, the same ones in every run; together they show every parameter's values early."""
    left = sorted(cases, key=lambda item: zlib.crc32(item.name.encode()))
    sample, seen = set(), set()
    while left and len(sample) < n:
        chosen = max(left, key=lambda item: len(_values(item) - seen))
        left.remove(chosen)
        sample.add(chosen)
        seen |= _values(chosen)
    return sample


def _values(case: pytest.Item) -> set[tuple[int, str]]:
    """(place of a `parametrize` among those of the test, id of its value) of a case.

    By the parts of a case's name: `callspec.indices` numbers the cases, not the values, where they are stacked.
    """
    return set(enumerate(case.callspec._idlist)) if hasattr(case, "callspec") else set()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[object]:
    """Compiles without LLVM's optimizations, in fixtures too; with them for tests marked `optimized`.

    `JAXMP_TEST_OPTIMIZED=1` compiles all tests with them, `JAXMP_TEST_OPTIMIZED=0` none.
    """
    import jax

    of_all = os.environ.get("JAXMP_TEST_OPTIMIZED")
    optimized = of_all == "1" if of_all else item.get_closest_marker("optimized") is not None
    jax.config.update("jax_disable_most_optimizations", not optimized)
    ran = yield
    if nextitem is not None and nextitem.path != item.path:
        # What a file leaves in the caches of jax stays: a later `gc.collect()`, of a test or of jaxmp, walked through
        # all of it, which took more than a second.
        gc.collect()
        gc.freeze()
    return ran

"""Results in a file, with which a run that was stopped goes on, and their table in README.md."""

import importlib.metadata
import json
import platform
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parents[1] / "benchmarks" / "results"


def new_results(command: str, packages: Iterable[str], steps: int) -> dict[str, Any]:
    """Results without a run."""
    versions = {package: importlib.metadata.version(package) for package in packages}
    about = {"command": command, "device": "CPU", "versions": {"python": platform.python_version(), **versions}}
    return about | {"steps": steps, "runs": []}


def goes_on(path: Path, results: dict[str, Any]) -> dict[str, Any]:
    """The stored results, if they are of the same versions and steps; else those given."""
    stored = json.loads(path.read_text()) if path.exists() else {}
    is_same = all(stored.get(key) == results[key] for key in ("versions", "steps"))
    return stored if is_same else results


def write(path: Path, results: dict[str, Any], begin: str, end: str, table: str) -> None:
    """Writes the results, whole or not at all, and their table between two marks of README.md."""
    path.with_suffix(".new").write_text(json.dumps(results, indent=1) + "\n")
    path.with_suffix(".new").replace(path)
    page = HERE / "README.md"
    before, rest = page.read_text().split(begin)
    page.write_text(f"{before}{begin}\n\n{table}\n\n{end}{rest.split(end)[1]}")


def footer(results: dict[str, Any]) -> str:
    """The line below a table: what was run, and in which versions."""
    versions = ", ".join(f"{package} {version}" for package, version in results["versions"].items())
    seeds = len({r["seed"] for r in results["runs"]})
    return f"{results['steps']} steps, {seeds} seed{'s' * (seeds > 1)}, on a CPU; {versions}."


def keep_programs() -> None:
    """Has jax keep what it compiles: another seed is the same program."""
    jax.config.update("jax_compilation_cache_dir", tempfile.mkdtemp())
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)

"""Measures what jaxmp costs, stores the results, and writes their tables into benchmarks/README.md.

Run it from the root of the project:

    python -m benchmarks cpu step           one entry
    python -m benchmarks h100               all entries of a folder, each in a process of its own
    python -m benchmarks h100 --table       only write the tables, from the stored results
    python -m benchmarks cpu step --tiny    the smallest sizes: writes nothing
    python -m benchmarks h100 steps         goes on with the rows that this code has not measured

The exit status is 1 if an entry fails or misses a target. Entries:
"""

import ast
import dataclasses
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Annotated

from benchmarks.lib.benchmark import Benchmark, run

HERE = Path(__file__).resolve().parent
GPU = "gpu"  # one entry, with options of its own


def entries() -> dict[str, str]:
    """Each entry's name, as on the command line, and the first line of its module's docstring."""
    files = [*sorted(HERE.glob("cpu/[!_]*.py")), *sorted(HERE.glob("h100/[!_]*.py"))]
    files += [*sorted(HERE.glob("tpu/[!_]*.py")), HERE / "gpu/run.py"]
    found = {}
    for file in [*files, HERE / "recipes.py", HERE / "sqnr.py"]:
        parts = file.relative_to(HERE).with_suffix("").parts
        docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
        found[GPU if parts[0] == GPU else " ".join(parts)] = docstring.split("\n")[0]
    return found


def load(name: str) -> Benchmark:
    """The benchmark of an entry other than "gpu"."""
    return importlib.import_module(f"benchmarks.{name.replace(' ', '.')}").BENCHMARK


def main(arguments: list[str]) -> int:
    """Runs what the command line asks for; returns the exit status."""
    if arguments[:1] == [GPU]:
        from benchmarks.gpu import run as gpu

        return gpu.main(arguments[1:])

    import tyro  # after the GPU's entry, which also runs where tyro is missing

    @dataclasses.dataclass(frozen=True)
    class Options:
        names: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
        """A folder or one of its entries, like `h100` or `h100 fp8`. With --table it may be left out: all tables."""
        table: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
        """Only write the tables, from the stored results."""
        tiny: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
        """Measure the smallest sizes, print the tables and write nothing: for entries of cpu, recipes and sqnr."""
        rows: str = "*"
        """Measure the rows that fit this pattern, such as `GPT*`: for `h100 optimizer` and `h100 steps`."""

    known = entries()
    lines = "\n".join(f"    {name:18}{line}" for name, line in known.items())
    options = tyro.cli(Options, prog="python -m benchmarks", description=f"{__doc__}\n{lines}", args=arguments)
    asked = " ".join(options.names)
    chosen = [name for name in known if asked in (name, name.split()[0])] if asked else [*known] * options.table
    if not chosen:
        print(f"Entries are: {', '.join(known)}; got: {asked or 'none'}", file=sys.stderr)
        return 2
    if chosen == [asked]:
        return run(load(asked), table=options.table, tiny=options.tiny, rows=options.rows)
    flags = ["--table"] * options.table + ["--tiny"] * options.tiny
    failed = []
    for name in chosen:
        print(f"--- {name}", flush=True)
        command = [sys.executable, "-m", "benchmarks", *name.split(), *flags]
        if subprocess.run(command, cwd=HERE.parent).returncode:
            failed.append(name)
    print(f"--- {len(chosen) - len(failed)} of {len(chosen)} passed", *(f"failed: {name}" for name in failed), sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

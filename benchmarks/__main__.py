"""Measures what jaxmp costs, stores the results, and writes their tables into benchmarks/README.md."""

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
HELP = """Run it from the root of the project:

    python -m benchmarks cpu step           one entry
    python -m benchmarks h100               all entries of a folder, each in a process of its own
    python -m benchmarks h100 --table       only write the tables, from the stored results
    python -m benchmarks cpu step --tiny    the smallest sizes: writes nothing
    python -m benchmarks h100 steps         goes on with the rows that this code has not measured

The exit status is 1 if an entry fails or misses a target. Entries:
"""


def entries() -> dict[str, str]:
    """Each entry's name, as on the command line, and the first line of its module's docstring."""
    files = [file for folder in ("cpu", "h100", "tpu") for file in sorted(HERE.glob(f"{folder}/[!_]*.py"))]
    lines = {}
    for file in [*files, HERE / "gpu/run.py", HERE / "recipes.py"]:
        parts = file.relative_to(HERE).with_suffix("").parts
        docstring = ast.get_docstring(ast.parse(file.read_text())) or ""
        lines[GPU if parts[0] == GPU else " ".join(parts)] = docstring.split("\n")[0]
    return lines


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
        """Measure the smallest sizes, print the tables and write nothing: for entries of cpu, tpu and recipes."""
        rows: str = "*"
        """Measure the rows that fit this pattern, such as `GPT*`: for `h100 optimizer` and `h100 steps`."""

    known = entries()
    lines = "\n".join(f"    {entry:18}{line}" for entry, line in known.items())
    options = tyro.cli(
        Options, prog="python -m benchmarks", description=f"{__doc__}\n\n{HELP}\n{lines}", args=arguments
    )
    name = " ".join(options.names)
    chosen = [entry for entry in known if name in (entry, entry.split()[0])] if name else [*known] * options.table
    if not chosen:
        print(f"Entries are: {', '.join(known)}; got: {name or 'none'}", file=sys.stderr)
        return 2
    if chosen == [name]:
        return run(load(name), table=options.table, tiny=options.tiny, rows=options.rows)
    flags = ["--table"] * options.table + ["--tiny"] * options.tiny
    failed = []
    for entry in chosen:
        print(f"--- {entry}", flush=True)
        command = [sys.executable, "-m", "benchmarks", *entry.split(), *flags]
        if subprocess.run(command, cwd=HERE.parent).returncode:
            failed.append(entry)
    passed = f"--- {len(chosen) - len(failed)} of {len(chosen)} passed"
    print(passed, *(f"failed: {entry}" for entry in failed), sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

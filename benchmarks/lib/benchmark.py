"""What every benchmark is: a function that measures, and one that makes tables of the results."""

import fnmatch
import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.lib import tables
from benchmarks.lib.versions import source


class Rows(NamedTuple):
    """What measures the rows of a benchmark one by one: each is stored when it is measured, and a second run goes on.

    Attributes:
      about: returns "device" and "versions" of the results.
      jobs: returns what measures each row, by the row's name, in the order of the table.
      missed: returns the targets that all rows together miss, in words; some rows may not be there.
    """

    about: Callable[[], dict[str, Any]]
    jobs: Callable[[], Mapping[str, Callable[[], dict[str, Any]]]]
    missed: Callable[[list[dict[str, Any]]], list[str]] = lambda rows: []


class Benchmark(NamedTuple):
    """One entry of `python -m benchmarks`: the constant `BENCHMARK` of its module.

    Results are a dict of "command", "device", "versions" and lists of rows. A row, or the results themselves, may list
    the targets that they miss under "missed", in words. Results are stored as JSON; the tables are made from that file.

    Attributes:
      name: as on the command line, like "h100 fp8".
      file: of the results, in benchmarks/results.
      measure: returns the results without "command"; or what measures them row by row.
      render: makes markdown of the results.
      measure_tiny: like `measure`, in the smallest sizes; None if there are none.
      page: has the markers between which the tables are written.
    """

    name: str
    file: str
    measure: Callable[[], dict[str, Any]] | Rows
    render: Callable[[dict[str, Any]], str]
    measure_tiny: Callable[[], dict[str, Any]] | None = None
    page: Path = tables.README

    @property
    def results(self) -> Path:
        return tables.RESULTS / self.file


def write_table(benchmark: Benchmark, results: dict[str, Any] | None = None) -> None:
    """Writes the tables of these results, or of the stored ones, into the page."""
    results = results or json.loads(benchmark.results.read_text())
    text = tables.with_versions(benchmark.render(results), results)
    tables.write_between(*tables.markers(benchmark.name), text, benchmark.page)


def measure_rows(benchmark: Benchmark, rows: Rows, pattern: str = "*") -> dict[str, Any]:
    """Measures the rows whose names fit `pattern` and that this code has not measured; stores each when it is there.

    A row has its name ("row"), the checksum of the code ("code"), and its versions, if they are not those of the last
    run. Stored rows that are no longer measured are dropped.
    """
    results = json.loads(benchmark.results.read_text()) if benchmark.results.exists() else {"rows": []}
    jobs, about, code = rows.jobs(), rows.about(), source()
    stored = {row["row"]: {"versions": results["versions"], **row} for row in results["rows"] if row.get("row") in jobs}
    todo = [name for name in jobs if fnmatch.fnmatchcase(name, pattern)]
    for name in todo:
        before = stored.get(name, {})
        if (before.get("code"), before.get("versions")) == (code, about["versions"]):
            continue
        print(f"{todo.index(name) + 1} of {len(todo)}: {name}", file=sys.stderr, flush=True)
        stored[name] = {"row": name, "code": code, "versions": about["versions"], **jobs[name]()}
        results = _store(benchmark, about, [stored[name] for name in jobs if name in stored], rows.missed)
    return results


def _store(benchmark: Benchmark, about: dict[str, Any], rows: list[dict[str, Any]], missed: Any) -> dict[str, Any]:
    """The results with these rows, after they were written to their file at once, or not at all."""
    rows = [{k: v for k, v in row.items() if (k, v) != ("versions", about["versions"])} for row in rows]
    results = {"command": f"python -m benchmarks {benchmark.name}", **about, "rows": rows, "missed": missed(rows)}
    part = benchmark.results.with_suffix(".part")
    part.write_text(json.dumps(results, indent=2) + "\n")
    os.replace(part, benchmark.results)
    return results


def run(benchmark: Benchmark, *, table: bool = False, tiny: bool = False, rows: str = "*") -> int:
    """Measures, stores the results, and writes and prints the tables.

    Args:
      benchmark: the entry.
      rows: pattern of the rows to measure, for an entry that is measured row by row.
      table: only write the tables, from the stored results.
      tiny: measure the smallest sizes and only print the tables: shows that the benchmark works.

    Returns:
      The exit status: 1 if a target is missed; 0 for `table` and `tiny`, which check none.
    """
    # The scaled gradients are an argument of most programs here, so nothing reads the scale.
    warnings.filterwarnings("ignore", message="a loss scale that nobody read")
    if table:
        write_table(benchmark)
        return 0
    if tiny:
        if benchmark.measure_tiny is None:
            raise SystemExit(f"{benchmark.name} has no tiny sizes")
        print(benchmark.render(benchmark.measure_tiny()))
        return 0
    if isinstance(benchmark.measure, Rows):
        results = measure_rows(benchmark, benchmark.measure, rows)
    elif rows != "*":
        raise SystemExit(f"{benchmark.name} is measured as a whole, without --rows")
    else:
        results = {"command": f"python -m benchmarks {benchmark.name}", **benchmark.measure()}
        benchmark.results.write_text(json.dumps(results, indent=2) + "\n")
    write_table(benchmark, results)
    print(benchmark.render(results), *results.get("missed", ()), sep="\n")
    all_rows = [row for part in results.values() if isinstance(part, list) for row in part if isinstance(row, dict)]
    return 1 if results.get("missed") or any(row.get("missed") for row in all_rows) else 0

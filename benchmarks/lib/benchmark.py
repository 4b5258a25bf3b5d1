"""What every benchmark is: a function that measures, and one that makes tables of the results.

Results are a dict of "command", "device", "versions" and lists of rows. A row, or the results themselves, may list the
targets that they miss under "missed", in words. Results are stored as JSON, and the tables are made from that file.
"""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.lib import tables


class Benchmark(NamedTuple):
    """One entry of `python -m benchmarks`: the constant `BENCHMARK` of its module.

    Attributes:
      name: as on the command line, like "h100 fp8".
      file: of the results, in benchmarks/results.
      measure: returns the results without "command".
      render: makes markdown of the results.
      measure_tiny: like `measure`, in the smallest sizes; None if there are none.
      page: has the markers between which the tables are written.
    """

    name: str
    file: str
    measure: Callable[[], dict[str, Any]]
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


def run(benchmark: Benchmark, *, table: bool = False, tiny: bool = False) -> int:
    """Measures, stores the results, and writes and prints the tables.

    Args:
      benchmark: the entry.
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
    results = {"command": f"python -m benchmarks {benchmark.name}", **benchmark.measure()}
    benchmark.results.write_text(json.dumps(results, indent=2) + "\n")
    write_table(benchmark, results)
    print(benchmark.render(results), *results.get("missed", ()), sep="\n")
    rows = [row for part in results.values() if isinstance(part, list) for row in part if isinstance(row, dict)]
    return 1 if results.get("missed") or any(row.get("missed") for row in rows) else 0

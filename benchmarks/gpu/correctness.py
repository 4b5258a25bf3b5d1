"""A section of the GPU run: the kernels' own tests (tests/kernels), compiled for this GPU."""

import os
import sys
from typing import Any

from benchmarks.lib.record import BAD, FAILED, LEFT_OUT, PASSED
from benchmarks.lib.tables import ROOT
from benchmarks.lib.timing import Bench, DeviceLost

KERNELS = ROOT / "tests" / "kernels"


def correctness(bench: Bench) -> None:
    """Runs the tests that launch kernels; in tiny sizes one of each file, interpreted."""
    run(bench, one_of_each_file=bench.tiny)


def run(bench: Bench, *, one_of_each_file: bool) -> None:
    """Runs all of the tests, or the first of each file; a test of each kernel before the others.

    pytest runs in this process without the project's configuration: a warning of another version is no failure here.
    """
    import pytest

    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    sys.path[:0] = [str(ROOT / "tests" / "support"), str(KERNELS)]
    files = sorted(map(str, KERNELS.glob("test_kernels_*.py")))
    options = ["-q", "-c", os.devnull, "--rootdir", str(ROOT), "--noconftest", "-p", "no:cacheprovider"]
    options += ["-W", "ignore::pytest.PytestUnknownMarkWarning", "--continue-on-collection-errors", "--tb=short"]
    plugin = Items(bench, one_of_each_file=one_of_each_file)
    status = pytest.main([*options, *files], plugins=[plugin])
    if plugin.lost:
        raise DeviceLost
    if status in (pytest.ExitCode.INTERNAL_ERROR, pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.INTERRUPTED):
        raise RuntimeError(f"pytest ended with {status!r}; its output stands in the section's log")


class Items:
    """A pytest plugin: every test is an item of the record, and those that are in it are not run again."""

    def __init__(self, bench: Bench, *, one_of_each_file: bool):
        self.bench, self.one_of_each_file = bench, one_of_each_file
        self.texts: list[str] = []
        self.outcome = PASSED
        self.error: Exception | None = None
        self.session: Any = None
        self.lost = False

    def pytest_sessionstart(self, session: Any) -> None:
        self.session = session

    def pytest_collectreport(self, report: Any) -> None:
        """A file that cannot be imported is an item that failed: a missing package costs the file."""
        if report.failed:
            self.bench.record.end(report.nodeid, FAILED, str(report.longrepr))

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        """Chooses the tests that launch kernels: the first case of each function, then the second, and so on."""
        del config
        seen: dict[Any, int] = {}
        places: dict[str, int] = {}
        items[:] = [item for item in items if self.bench.kernels in item.nodeid.partition("[")[2]]  # its backend
        for item in items:
            function = item.nodeid.partition("[")[0]
            places[item.nodeid] = seen[function] = seen.get(function, -1) + 1
        items.sort(key=lambda item: places[item.nodeid])
        if self.one_of_each_file:
            first = {str(item.path): item for item in reversed(items)}
            items[:] = [item for item in items if first[str(item.path)] is item]
        items[:] = [item for item in items if item.nodeid not in self.bench.record.items]

    def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> bool | None:
        """Leaves a test out when the section's time is over; otherwise begins it."""
        del nextitem
        if self.bench.out_of_time(item.nodeid):
            return True
        self.texts, self.outcome, self.error = [], PASSED, None
        self.bench.record.begin(item.nodeid)
        return None

    def pytest_runtest_makereport(self, item: Any, call: Any) -> None:
        """Keeps the error itself: it tells whether the device may be lost."""
        if call.excinfo is not None and isinstance(call.excinfo.value, Exception):
            self.error = call.excinfo.value

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Notes how a test ended, after its last phase."""
        if report.failed:
            self.outcome = FAILED
            self.texts.append(str(report.longrepr))
        elif report.skipped and self.outcome == PASSED:
            self.outcome = LEFT_OUT
            self.texts.append(str(report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longrepr))
        if report.when == "teardown":
            self.bench.record.end(report.nodeid, self.outcome, "\n".join(self.texts))
            if self.outcome in BAD and self.error is not None:
                try:
                    self.bench.look_at_device(self.error)
                except DeviceLost:
                    self.lost, self.session.shouldstop = True, "the device no longer works"

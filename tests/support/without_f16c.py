"""A pytest plugin for CPUs older than F16C (SSE4_2): what XLA cannot compile there is skipped, and nothing else.

jaxlib lacks the functions that convert float16 in software (`Symbols not found: [ __truncsfhf2 ]` on stderr): it
compiles no program with float16, with jaxmp or without. `portable.py` loads this plugin for its variant `sse4_2`.
A search for a precision goes on without the formats that do not compile: there stderr alone tells why the test failed.
"""

import doctest
from collections.abc import Iterator

import pytest

NOT_LINKED = "Failed to materialize symbols"
ON_STDERR = "Symbols not found: [ __truncsfhf2 ]"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    report = yield
    open_ = [call.excinfo.value] if call.excinfo else []
    noted = report.failed and any(ON_STDERR in text for _, text in report.sections)
    while open_:
        error = open_.pop()
        if noted or NOT_LINKED in str(error):
            report.outcome = "skipped"
            report.longrepr = (str(item.path), item.location[1] or 0, "Skipped: XLA has no float16 without F16C")
        open_ += [e for e in (error.__cause__, error.__context__) if e is not None]
        open_ += getattr(error, "failures", [])  # of a doctest, which goes on after a failure
        open_ += [error.exc_info[1]] if isinstance(error, doctest.UnexpectedException) else []
    return report

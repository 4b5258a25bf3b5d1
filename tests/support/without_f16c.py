"""A pytest plugin for CPUs older than F16C (SSE4_2): what XLA cannot compile there is skipped, and nothing else.

jaxlib lacks the functions that convert float16 in software (`Symbols not found: [ __truncsfhf2 ]` on stderr): it
compiles no program with float16, with jaxmp or without. `portable.py` loads this plugin for its variant `sse4_2`.
"""

from collections.abc import Iterator

import pytest

NOT_LINKED = "Failed to materialize symbols"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[None]:
    report = yield
    error = call.excinfo.value if call.excinfo else None
    while error is not None:
        if NOT_LINKED in str(error):
            report.outcome = "skipped"
            report.longrepr = (str(item.path), item.location[1] or 0, "Skipped: XLA has no float16 without F16C")
        error = error.__cause__ or error.__context__
    return report

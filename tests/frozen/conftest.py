"""Says at the end which frozen runs could not be compared bit for bit on this machine."""

import collections

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line, where there is something to say."""
    reports = [r for found in terminalreporter.stats.values() for r in found if getattr(r, "when", "") == "call"]
    why = [value for r in reports for key, value in r.user_properties if key == "compared in ulps"]
    if why:
        of = collections.Counter(name for names in why for name in str(names).split(", "))
        terminalreporter.write_line(f"frozen runs compared in ulps, not in bits: {len(why)}, for {dict(of)}")

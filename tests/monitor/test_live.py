"""A monitor that draws itself: one picture in a notebook, which is replaced; in a script a `Monitor`."""

import base64
import re

import pytest

from jaxmp import monitor
from jaxmp._src.monitor import live
from jaxmp._src.monitor.rules import Finding

METRICS = {"loss_scale": 8.0, "skipped": False}


class Notebook:
    """What IPython does with `display(..., display_id=True)`: all that was ever shown, and below how many cells."""

    def __init__(self, monkeypatch):
        self.pages, self.outputs = [], 0
        display = pytest.importorskip("IPython.display")
        monkeypatch.setattr(display, "display", self.display)
        monkeypatch.setattr(live, "_in_notebook", lambda: True)

    def display(self, page, *, display_id):
        assert display_id is True
        self.outputs += 1
        self.update(page)
        return self

    def update(self, page):
        self.pages.append(page.data)


def run(to, steps, start=0):
    for step in range(start, start + steps):
        to.update(step, METRICS, loss=1.0 / (step + 1))


def test_a_notebook_shows_one_picture_that_is_replaced(monkeypatch):
    notebook = Notebook(monkeypatch)
    shown = monitor.LiveMonitor(every=0.0, lag=2)
    run(shown, 2)
    assert notebook.pages == []  # no step was read
    run(shown, 3, start=2)
    assert (notebook.outputs, len(notebook.pages)) == (1, 3)
    shown.finish()
    assert (notebook.outputs, len(notebook.pages)) == (1, 4)
    shown.finish()
    monitor.plot_loss_and_scale(shown)  # finishes the run, which has nothing new
    assert len(notebook.pages) == 4
    assert [re.search(r"<p>(\d) steps", page)[1] for page in notebook.pages] == ["1", "2", "3", "5"]
    for page in notebook.pages:
        (picture,) = re.findall(r'src="data:image/png;base64,(.*?)"', page)
        assert base64.b64decode(picture).startswith(b"\x89PNG")
    assert len(set(notebook.pages)) == 4


def test_it_is_drawn_no_more_often_than_asked(monkeypatch):
    notebook = Notebook(monkeypatch)
    shown = monitor.LiveMonitor(every=3600.0, lag=0)
    run(shown, 5)
    assert len(notebook.pages) == 1
    shown.finish()
    assert len(notebook.pages) == 2 and "<p>5 steps" in notebook.pages[-1]


def test_findings_stand_below_the_picture(monkeypatch):
    notebook = Notebook(monkeypatch)
    shown = monitor.LiveMonitor(every=0.0, lag=0, warn=False)
    run(shown, 1)
    assert "<h3>" not in notebook.pages[-1]
    shown.findings.append(Finding("overflow", 0, "grads/a<b", "all of it is > 65504."))
    run(shown, 1, start=1)
    assert "grads/a&lt;b" in notebook.pages[-1] and "1 findings" in notebook.pages[-1]


def test_a_script_shows_nothing_and_records_as_a_monitor(capsys):
    shown, plain = monitor.LiveMonitor(every=0.0), monitor.Monitor()
    run(shown, 4)
    run(plain, 4)
    shown.finish()
    plain.finish()
    assert list(shown.steps) == list(plain.steps) and isinstance(shown, monitor.Monitor)
    assert capsys.readouterr() == ("", "")


def test_a_bad_number_of_seconds_is_named():
    with pytest.raises(ValueError, match="every must be a number of seconds, at least 0; got -1"):
        monitor.LiveMonitor(every=-1)
    with pytest.raises(ValueError, match="window must be at least 1; got 0"):
        monitor.LiveMonitor(window=0)

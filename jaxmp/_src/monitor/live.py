"""A `Monitor` that draws itself below the cell of a notebook: one picture, which is replaced as the run goes on."""

import base64
import html
import io
import sys
import time
from typing import Any

from jaxmp._src.monitor import plots
from jaxmp._src.monitor.monitor import Monitor
from jaxmp._src.monitor.rules import Finding
from jaxmp._src.monitor.step_stats import StepStats


class LiveMonitor(Monitor):
    """A `Monitor` whose loss, loss scale, skips and findings are seen in a notebook while the run goes on.

    The first `update` shows a picture below the cell, later ones replace it, and `finish` draws the last steps. It
    shows the steps that were read: reading waits for no step in flight. In a script it shows nothing, and is a
    `Monitor`.

    Args:
      every: seconds between two pictures, at least. Drawing takes a few tenths of a second.
      smooth: number of steps over which the loss is averaged.
      **kwargs: as for `Monitor`.

    Raises:
      ImportError: in a notebook, at the first picture: matplotlib is not installed.
      ValueError: `every` is negative, or an argument that `Monitor` refuses.

    Example:
      >>> monitor = LiveMonitor(every=2.0)
      >>> for step in range(3):
      ...     found = monitor.update(step, {"loss_scale": 8.0, "skipped": False}, loss=1.0)
      >>> found = monitor.finish()
      >>> len(monitor.steps)
      3
    """

    def __init__(self, *, every: float = 5.0, smooth: int = 1, **kwargs: Any) -> None:
        """Sets how often it is drawn, and the thresholds of `Monitor`."""
        super().__init__(**kwargs)
        if every < 0:
            raise ValueError(f"every must be a number of seconds, at least 0; got {every}.")
        self._every, self._smooth = every, smooth
        self._handle: Any = None  # of the picture in the notebook
        self._drawn_at, self._drawn = -float("inf"), None  # when, and the last step in the picture

    def update(
        self, step: int, metrics: dict[str, Any], *, loss: Any = None, stats: StepStats | None = None
    ) -> list[Finding]:
        """As `Monitor.update`; then draws, if `every` seconds are over."""
        findings = super().update(step, metrics, loss=loss, stats=stats)
        if time.perf_counter() - self._drawn_at >= self._every:
            self._draw()
        return findings

    def finish(self) -> list[Finding]:
        """As `Monitor.finish`; then draws the last steps."""
        findings = super().finish()
        self._draw()
        return findings

    def _draw(self) -> None:
        if not self.steps or self.steps[-1] is self._drawn or not _in_notebook():
            return
        from IPython.display import HTML, display  # it is there, where the notebook runs

        picture, rows = io.BytesIO(), []
        plots.plot_loss_and_scale(list(self.steps), smooth=self._smooth).savefig(picture, facecolor="white")
        for finding in self.findings:
            where = f" at <code>{html.escape(finding.path)}</code>" if finding.path else ""
            rows.append(f"<h3>step {finding.step}: {finding.kind}{where}</h3>\n<p>{html.escape(finding.message)}</p>")
        page = HTML(
            f'<img alt="loss and loss scale" style="max-width: 100%" '
            f'src="data:image/png;base64,{base64.b64encode(picture.getvalue()).decode()}">\n'
            f"<p>{str(self).splitlines()[0]}</p>\n" + "\n".join(rows)
        )
        if self._handle is None:
            self._handle = display(page, display_id=True)
        else:
            self._handle.update(page)
        self._drawn_at, self._drawn = time.perf_counter(), self.steps[-1]


def _in_notebook() -> bool:
    """Whether the cell of a notebook runs this."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None

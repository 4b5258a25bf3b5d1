"""A run as one HTML file: its findings, and the plots of what was recorded."""

import base64
import datetime
import html
import io
import os
from pathlib import Path
from typing import Any

from jaxmp._src.monitor import plots
from jaxmp._src.monitor.monitor import Monitor

_STYLE = """
body { font: 1rem/1.5 system-ui, sans-serif; max-width: 52rem; margin: 2rem auto; padding: 0 1rem }
body { color: #222; background: #fff; overflow-wrap: break-word }
h3 { font-size: 1rem; margin-bottom: 0 }
h3 + p { margin-top: 0 }
img { max-width: 100%; background: #fff }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: #1e2129 } }
"""


def write_report(monitor: Monitor, path: Any, *, title: str = "A training run") -> Path:
    """Writes one HTML file about a run, which needs no other file and no network.

    It has the number of steps, skips and findings, the findings with their paths, and plots: loss and loss
    scale with the skipped steps; if steps were sampled, the magnitudes of gradients and activations by layer, the
    exponents of the last sample, and fp8 amaxes and scales.

    Args:
      monitor: of the run. It waits for the steps that are in flight.
      path: of the file; an old one is replaced.
      title: of the page.

    Returns:
      The path.

    Raises:
      ImportError: matplotlib is not installed.
      TypeError: arguments in the place of others, or a title that is no text.
      ValueError: no step was recorded; there is no folder for the file.

    Example:
      >>> import tempfile, jaxmp
      >>> monitor = Monitor()
      >>> for step in range(3):
      ...     found = monitor.update(step, {"loss_scale": 8.0, "skipped": step == 1}, loss=1.0)
      >>> path = write_report(monitor, tempfile.mkdtemp() + "/run.html", title="three steps")
      >>> "3 steps, 1 skipped" in path.read_text()
      True
    """
    target = _checked(monitor, path, title)
    monitor.finish()
    pictures = {name: picture(figure) for name, figure in _figures(monitor).items()}
    summary = str(monitor).splitlines()[0]
    parts = [
        f"<h1>{html.escape(title)}</h1>",
        f"<p>{summary}. Written {datetime.datetime.now():%Y-%m-%d %H:%M}.</p>",
        "<h2>Findings</h2>",
        findings(monitor),
        *(f'<h2>{name}</h2>\n<img alt="{name}" src="{source}">' for name, source in pictures.items()),
    ]
    page = (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
    )
    target.write_text(page + "\n".join(parts) + "\n</body>\n</html>\n", encoding="utf-8")
    return target


def _checked(monitor: Any, path: Any, title: Any) -> Path:
    """The path of the file, before anything is drawn."""
    if not isinstance(monitor, Monitor) or not isinstance(path, str | os.PathLike) or not isinstance(title, str):
        got = ", ".join(type(x).__name__ for x in (monitor, path, title))
        raise TypeError(
            f"the arguments are write_report(monitor, path, title='...'), a jaxmp.monitor.Monitor, a path and a text; "
            f"got {got}."
        )
    target = Path(path)
    if target.is_dir() or not target.parent.is_dir():
        wrong = "is a folder" if target.is_dir() else "lies in a folder that does not exist"
        raise ValueError(
            f"the report is written to a file in a folder that is there; {target} {wrong}. Make the "
            f"folder, or name a file in another one."
        )
    return target


def _figures(monitor: Monitor) -> dict[str, Any]:
    """The plots for which something was recorded, by their headings."""
    found = {"Loss and loss scale": plots.plot_loss_and_scale(monitor)}
    if not monitor.samples:
        return found
    last = monitor.samples[-1][1]
    if last.grads.names:
        found["Gradients by layer"] = plots.plot_layers(monitor)
        if last.grads.octaves.shape[1]:
            found["Exponents of the gradients of the last sample"] = plots.plot_exponents(last)
    if last.activations is not None and last.activations.names:
        found["Activations by layer"] = plots.plot_layers(monitor, of="activations")
    if last.fp8.amax:
        found["fp8 tensors"] = plots.plot_fp8(monitor)
    return found


def picture(figure: Any) -> str:
    """A figure as the address of an image, which holds it whole."""
    file = io.BytesIO()
    figure.savefig(file, format="png", facecolor="white")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def findings(monitor: Monitor) -> str:
    """The findings as HTML."""
    parts = []
    for finding in monitor.findings:
        where = f" at <code>{html.escape(finding.path)}</code>" if finding.path else ""
        head = f"step {finding.step}: {html.escape(finding.kind)}{where}"
        parts.append(f"<h3>{head}</h3>\n<p>{html.escape(finding.message)}</p>")
    return "\n".join(parts) or "<p>None.</p>"

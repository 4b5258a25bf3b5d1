"""The report of a run: one file that needs no other, with what was recorded and nothing else."""

import base64
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from jaxmp import monitor
from jaxmp._src.monitor.rules import Finding


def report_of(tmp_path, run, **kwargs):
    path = monitor.write_report(run, tmp_path / "run.html", **kwargs)
    assert path == tmp_path / "run.html"
    return path.read_text()


def recorded(*, sampled, nonfinite=False):
    """Five steps with the loss scale at its floor, of which all but the first overflow."""
    run, step_stats = monitor.Monitor(warn=False), jax.jit(monitor.step_stats)
    params = {"a<b": jnp.ones((4, 4), jnp.float16)}
    opt_state = jaxmp.mixed_precision(optax.sgd(0.1), "fp16", loss_scale=jaxmp.DynamicLossScale(1.0)).init(params)
    for step in range(5):
        skipped = nonfinite and step > 0
        grads = {"a<b": jnp.full((4, 4), np.inf if skipped else 2.0**-step, jnp.float16)}
        stats = step_stats(grads, opt_state, params) if sampled else None
        metrics = {"loss_scale": 1.0, "skipped": float(skipped), "pinned_overflows": float(step * skipped)}
        run.update(step, metrics, loss=1.0, stats=stats)
    return run


def headings(text):
    return re.findall(r"<h2>(.*?)</h2>", text)


def test_without_samples_it_has_the_loss_and_its_scale(tmp_path):
    text = report_of(tmp_path, recorded(sampled=False), title="a & b")
    assert "<title>a &amp; b</title>" in text and "5 steps, 0 skipped, 0 sampled, 0 findings" in text
    assert headings(text) == ["Findings", "Loss and loss scale"] and "<p>None.</p>" in text


def test_it_needs_no_other_file(tmp_path):
    text = report_of(tmp_path, recorded(sampled=True))
    assert headings(text)[2:] == ["Gradients by layer", "Exponents of the gradients of the last sample"]
    sources = re.findall(r'(?:src|href)="(.*?)"', text)
    assert len(sources) == 3
    for source in sources:
        kind, _, data = source.partition(",")
        assert kind == "data:image/png;base64" and base64.b64decode(data).startswith(b"\x89PNG")


def test_findings_stand_with_their_paths_escaped(tmp_path):
    run = recorded(sampled=True, nonfinite=True)
    run.findings.append(Finding("overflow", 4, "grads/a<b", "all of it is > 65504."))
    text = report_of(tmp_path, run)
    assert run.findings and text.count("<h3>") == len(run.findings)
    assert "<code>grads/a&lt;b</code>" in text and "all of it is &gt; 65504." in text and "a<b" not in text
    assert "stuck_scale" in text


def test_a_run_without_steps_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no step was recorded"):
        monitor.write_report(monitor.Monitor(), tmp_path / "run.html")
    assert not (tmp_path / "run.html").exists()


@pytest.mark.parametrize(
    ("arguments", "kind", "told"),
    {
        "no monitor": ((None, "run.html"), TypeError, r"got NoneType, str, str"),
        "no title": ((monitor.Monitor(), "run.html", None), TypeError, r"title='...'.*got Monitor, str, NoneType"),
        "swapped": (("run.html", monitor.Monitor()), TypeError, r"got str, Monitor, str"),
        "no folder": ((monitor.Monitor(), "none/run.html"), ValueError, r"none/run.html lies in a folder"),
        "folder": ((monitor.Monitor(), "."), ValueError, r"is a folder. Make the folder, or name a file"),
    }.values(),
)  # fmt: skip
def test_arguments_that_no_report_can_be_written_from(arguments, kind, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run, path, *title = arguments
    with pytest.raises(kind, match=told):
        monitor.write_report(run, path, **({"title": title[0]} if title else {}))
    assert not list(tmp_path.iterdir())

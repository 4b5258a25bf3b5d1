"""The stored notebooks are executed and small, end in a picture, and contain no paths. `make notebooks` runs them."""

import json
import re

import pytest

from helpers import ROOT

EXAMPLES = ROOT / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def outputs_of(cell: dict) -> list[dict]:
    return cell.get("outputs", [])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stored_executed_and_ends_in_a_picture(path):
    assert path.stat().st_size < 250_000
    cells = json.loads(path.read_text())["cells"]
    first, last = cells[0], cells[-1]
    intro = "".join(first["source"])
    assert first["cell_type"] == "markdown" and "CPU" in intro and "GPU" in intro and "T4" in intro
    assert "`pip install '.[notebooks]'`" in intro and "(https://colab.research.google.com/)" in intro
    assert any("image/png" in output.get("data", {}) for output in outputs_of(last))
    counts = [cell["execution_count"] for cell in cells if cell["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1))  # run from top to bottom, once


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_outputs_name_no_path_and_no_error(path):
    for cell in json.loads(path.read_text())["cells"]:
        for output in outputs_of(cell):
            assert output["output_type"] != "error" and output.get("name") != "stderr", output
            text = "".join(output.get("text", [])) + "".join(output.get("data", {}).get("text/plain", []))
            assert not re.search(r"(^|[\s'\"(=])[~/][\w.-]+/|ipykernel|\.py:\d|0x[0-9a-f]{6}", text), text


def test_links_of_notebooks_lead_somewhere():
    for path in NOTEBOOKS:
        for cell in json.loads(path.read_text())["cells"]:
            for target in re.findall(
                r"\]\(([^)#]+)[^)]*\)", "".join(cell["source"]) if cell["cell_type"] == "markdown" else ""
            ):
                assert "://" in target or (EXAMPLES / target).exists(), f"{path.name}: {target}"

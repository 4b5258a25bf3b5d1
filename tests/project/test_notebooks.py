"""The stored notebooks are executed and small, end in a picture, and contain no paths. `make notebooks` runs them."""

import json
import re

import pytest

from helpers import ROOT

EXAMPLES = ROOT / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stored_executed_and_ends_in_a_picture(path):
    assert path.stat().st_size < 250_000
    cells = json.loads(path.read_text())["cells"]
    intro = "".join(cells[0]["source"])
    assert cells[0]["cell_type"] == "markdown" and "CPU" in intro and "GPU" in intro and "T4" in intro
    assert "`pip install '.[notebooks]'`" in intro and "(https://colab.research.google.com/)" in intro
    assert any("image/png" in output.get("data", {}) for output in cells[-1]["outputs"])
    counts = [cell["execution_count"] for cell in cells if cell["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1))  # run from top to bottom, once
    for output in (output for cell in cells for output in cell.get("outputs", [])):
        assert output["output_type"] != "error" and output.get("name") != "stderr", output
        text = "".join(output.get("text", [])) + "".join(output.get("data", {}).get("text/plain", []))
        assert not re.search(r"(^|[\s'\"(=])[~/][\w.-]+/|ipykernel|\.py:\d|0x[0-9a-f]{6}", text), text
    texts = ("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    links = [target for text in texts for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text)]
    assert [target for target in links if "://" not in target and not (EXAMPLES / target).exists()] == []

"""Makes pages from files outside docs/: the changelog, benchmarks, examples.

benchmarks/README.md becomes one page for each of its sections; another page gives an overview of benchmarks/results.
Scripts and notebooks of examples/ are shown as they are, notebooks with their stored outputs. Links between files of
the repository become links between pages. A file that has no page is copied.
"""

import ast
import functools
import json
import posixpath
import re
from pathlib import Path

from markdown.extensions.toc import slugify
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = "benchmarks/README.md"
GALLERY = "examples/index.md"
MOVED = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/scaling.md": "performance/scaling.md",
    "examples/third_party/README.md": "examples/third_party.md",
    BENCHMARKS: "performance/index.md",
}
# Room for wide tables and long lines; and a search names the pages that explain before tables and sources.
WITHOUT_CONTENTS = "---\nhide:\n  - toc\nsearch:\n  boost: 0.2\n---\n\n"
LINK = re.compile(r"\]\(([^)\s]+)( '[^']*')?\)")  # a title names the row of a table (tests/project/test_claims.py)
FENCE = re.compile(r"(^```.*?^```$)", flags=re.MULTILINE | re.DOTALL)


def examples() -> dict[str, str]:
    """Scripts and notebooks, and their pages."""
    found = sorted(path for path in (ROOT / "examples").iterdir() if path.suffix in (".py", ".ipynb"))
    return {f"examples/{path.name}": f"examples/{path.name.replace('.', '_')}.md" for path in found}


@functools.cache
def sections() -> dict[str, str]:
    """The sections of benchmarks/README.md by page; the heading of a section is the title of its page."""
    parts = re.split(r"^## (?=.)", (ROOT / BENCHMARKS).read_text(), flags=re.MULTILINE)[1:]
    return {
        f"performance/{slugify(part.splitlines()[0], '-')}.md": "# " + part.replace("\n### ", "\n## ") for part in parts
    }


def results() -> str:
    """The overview: the files of benchmarks/results, and the commands that made them."""
    lines = [
        "# Performance",
        "",
        "Nobody copies these numbers by hand: `python -m benchmarks` measures or counts, stores the results as JSON,",
        "and writes the tables. Programs that are *compiled for H100* were not run; what was timed on a GPU says so.",
        "",
        *(f"- [{text.splitlines()[0][2:]}]({Path(page).name})" for page, text in sections().items()),
        "- [Communication between devices in a step](scaling.md)",
        "",
        "| results | on | with | made by |",
        "|---|---|---|---|",
    ]
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        found = json.loads(path.read_text())
        versions = found.get("versions") or found.get("packages") or {}
        with_ = ", ".join(f"{name} {versions[name]}" for name in ("python", "jax", "optax") if name in versions)
        made_by = found.get("command", "")
        on = found.get("device") or found.get("devices") or ""
        lines.append(f"| [{path.name}](../../benchmarks/results/{path.name}) | {on} | {with_} | {made_by} |")
    return "\n".join([*lines, "", *losses()]) + "\n"


def losses() -> list[str]:
    """Held-out losses of the stored runs over seeds, each policy beside the one that it is compared with."""
    found = json.loads((ROOT / "benchmarks" / "results" / "parity.json").read_text())
    lines = [
        "## Loss of each policy and recipe",
        "",
        f"Held-out loss in nats per byte after {found['config']['steps']} steps of the transformer of "
        f"[examples/train.py](../../examples/train.py), {found['config']['width']} wide, mean ± deviation over seeds; "
        "gaps are paired by seed, ± their standard error. Evaluated in fp8: what the same trained params lose. "
        "[examples/parity.py](../../examples/parity.py) explains it.",
        "",
        "| policy | seeds | loss | against | gap [%] | fp8 FLOPs [%] | evaluated in fp8 [%] | skipped steps |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for policy, row in found["summary"].items():
        cells = [policy, row["seeds"], _around(row["mean"], row["std"], ".4f"), "", "", "", "", row["skipped_steps"]]
        if "mean_gap_percent" in row:
            gap = _around(row["mean_gap_percent"], row["standard_error_percent"], "+.2f")
            cells[3:5] = row["baseline"], gap
        if row["fp8_flops_percent"]:
            cells[5:7] = f"{row['fp8_flops_percent']:.0f}", f"{row['in_fp8_mean_gap_percent']:+.2f}"
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return [*lines, "", *losses_of_16_bits()]


def _around(mean: float, deviation: float | None, digits: str) -> str:
    """A mean with its deviation, which one seed alone does not have."""
    return f"{mean:{digits}}" + ("" if deviation is None else f" ± {deviation:{digits.lstrip('+')}}")


def losses_of_16_bits() -> list[str]:
    """Runs of 16 bits on four simulated devices, which an earlier examples/parity.py made."""
    lines = [
        "## Loss of 16 bits",
        "",
        "Five seeds of 1500 steps of the same model on four simulated devices, which an earlier version of "
        "examples/parity.py made; gaps ± their deviation over seeds. Three float16 steps overflow by force.",
        "",
        "| policy | loss | against | gap | skipped steps |",
        "|---|---|---|---|---|",
    ]
    for name in ("parity_16bit", "parity_8bit"):
        found = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
        for policy, row in found["summary"].items():
            gap = "" if policy == row["baseline"] else f"{row['mean_gap']:+.4f} ± {row['std_of_gaps']:.4f}"
            loss = f"{row['mean']:.4f} ± {row['std']:.4f}"
            lines.append(f"| {policy} | {loss} | {row['baseline']} | {gap} | {row['skipped_steps']} |")
    return [*lines, ""]


def script(path: Path) -> str:
    """A page that shows a script."""
    return f"# examples/{path.name}\n\n```py\n{path.read_text()}```\n"


def notebook(path: Path) -> str:
    """A page that shows a notebook: text, code, and stored outputs. Nothing runs."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```py\n{source}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" in data:
                parts.append(f"![output](data:image/png;base64,{''.join(data['image/png']).strip()})")
            elif "text" in output or "text/plain" in data:
                parts.append(f"```text\n{''.join(output.get('text') or data['text/plain']).rstrip()}\n```")
    return "\n\n".join(parts) + f"\n\nThis is [the notebook]({path.name}), which runs in the tests.\n"


def picture_of(path: Path) -> str:
    """The last picture of a notebook, as base64."""
    outputs = [o for cell in json.loads(path.read_text())["cells"] for o in cell.get("outputs", [])]
    return "".join([o["data"]["image/png"] for o in outputs if "image/png" in o.get("data", {})][-1]).strip()


def gallery() -> str:
    """The first page of the examples: notebooks with their last pictures, and scripts with their first line."""
    lines = ["# Examples", "", "Each notebook ran as it is shown, and runs in the tests.", "", "## Notebooks", ""]
    for source, page in examples().items():
        path, link = ROOT / source, Path(page).name
        if path.suffix == ".ipynb":
            intro = "".join(json.loads(path.read_text())["cells"][0]["source"]).splitlines()
            sentence = re.split(r"(?<=[.:]) ", " ".join(intro[2:]))[0].rstrip(":").rstrip(".")
            picture = f"[![{path.stem}](data:image/png;base64,{picture_of(path)}){{.thumbnail}}]({link})"
            lines += [f"### [{intro[0].lstrip('# ')}]({link})", "", picture, "", f"{sentence}.", ""]
    lines += ["## Scripts", "", "| script | what it shows |", "|---|---|"]
    for source, page in examples().items():
        path = ROOT / source
        if path.suffix == ".py":
            what = (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0]
            lines.append(f"| [{path.name}]({Path(page).name}) | {what} |")
    lines.append("| [third_party](third_party.md) | Models of transformers, haiku and equinox in four precisions |")
    return "\n".join(lines) + "\n"


@functools.cache
def anchors() -> dict[str, str]:
    """The page of each heading of benchmarks/README.md."""
    found = {}
    for page, text in sections().items():
        title, *rest = re.findall(r"^#+ (.*)$", FENCE.sub("", text), flags=re.MULTILINE)
        found[slugify(title, "-")] = page
        found |= {slugify(heading, "-"): f"{page}#{slugify(heading, '-')}" for heading in rest}
    return found


def source_and_text(uri: str) -> tuple[str, str] | None:
    """For a page from outside docs/: its file, and its text before links are changed."""
    if uri in sections():
        return BENCHMARKS, sections()[uri]
    if uri == "performance/index.md":
        return "docs/performance/index.md", results()
    if uri == GALLERY:
        return "docs/examples/index.md", gallery()
    found = {page: source for source, page in (MOVED | examples()).items() if source != "README.md"}
    if uri not in found:
        return None
    path = ROOT / found[uri]
    text = {".py": script, ".ipynb": notebook}.get(path.suffix, Path.read_text)(path)
    return found[uri], text


def generated() -> list[str]:
    """All pages from outside docs/."""
    return [page for source, page in (MOVED | examples()).items() if source != "README.md"] + [
        *sections(),
        GALLERY,
    ]


def turned(link: str, source: str, uri: str) -> tuple[str, str | None]:
    """A link in `source` as the page `uri` needs it, and the file that must be copied for it."""
    target, _, anchor = link.partition("#")
    if "://" in link or link.startswith(("data:", "mailto:")) or (not target and source != BENCHMARKS):
        return link, None
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target)) if target else source
    copied = None
    if path == BENCHMARKS and anchor:
        found, anchor = anchors()[anchor].partition("#")[::2]
    elif path in MOVED | examples() and not (uri.startswith("examples/") and path.endswith(".ipynb")):
        found = (MOVED | examples())[path]
    elif path.startswith("docs/"):
        found = path.removeprefix("docs/")
    else:
        found = copied = path
    relative = posixpath.relpath(found, posixpath.dirname(uri) or ".")
    return f"{relative}#{anchor}" if anchor else relative, copied


def turn_links(text: str, source: str, uri: str) -> tuple[str, set[str]]:
    """A page with changed links, and the files that must be copied for it."""
    copies = set()

    def replace(match):
        link, copied = turned(match[1], source, uri)
        copies.add(copied)
        return f"]({link}{match[2] or ''})"

    parts = FENCE.split(text)
    parts[::2] = [LINK.sub(replace, part) for part in parts[::2]]
    return "".join(parts), copies - {None}


def on_config(config):
    """Fills the navigation's `Examples` and `Performance`."""
    lists = {
        "Examples": [GALLERY, *({Path(s).name: page} for s, page in examples().items()), "examples/third_party.md"],
        "Performance": ["performance/index.md", *sections(), "performance/scaling.md"],
    }
    for entry in config.nav:
        entry |= {name: pages for name, pages in lists.items() if name in entry}
    return config


def on_files(files, config):
    """Adds the pages, and copies of files that they link to."""
    needed = set()
    for file in files.documentation_pages():
        if not file.src_uri.startswith("reference/"):
            needed |= turn_links(file.content_string, f"docs/{file.src_uri}", file.src_uri)[1]
    for uri in generated():
        source, text = source_and_text(uri)
        text, copies = turn_links(text, source, uri)
        needed |= copies
        wide = uri.startswith("performance/") or uri.endswith("_py.md")
        files.append(File.generated(config, uri, content=WITHOUT_CONTENTS * wide + text))
    for path in sorted(needed):
        if (ROOT / path).is_file():  # else the link is reported as broken
            files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown, page, config, files):
    """Changes the links of pages in docs/ that lead out of it."""
    if source_and_text(page.file.src_uri) or page.file.src_uri.startswith("reference/"):
        return markdown
    return turn_links(markdown, f"docs/{page.file.src_uri}", page.file.src_uri)[0]

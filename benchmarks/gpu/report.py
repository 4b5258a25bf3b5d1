"""What the GPU run found: a summary, the targets, junit, and the tables of README.md and benchmarks/README.md.

It reads the JSON files of sections only, and needs Python alone. Where nothing was measured it writes nothing.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

from benchmarks.lib.record import BAD, LEFT_OUT, NO_TIME, PASSED, Record
from benchmarks.lib.tables import README, ROOT, markdown, markers, with_versions, write_between

FRONT = ROOT / "README.md"  # its table is the short one
NOT_YET = "No run on a GPU yet, so no times."


class Target(NamedTuple):
    """The least that a measured value has to reach.

    Attributes:
      section: the section that measures it.
      what: the rows with this name.
      of: (variant, field) of the value.
      by: (variant, field) to divide the value by, or None.
      least: the lower bound.
      meaning: the unit of the bound, in words.
      front: whether README.md has it too.
    """

    section: str
    what: str
    of: tuple[str, str]
    by: tuple[str, str] | None
    least: float
    meaning: str
    front: bool = False


def all_targets() -> list[Target]:
    """All targets."""
    of_copy, us = ("mosaic", "of_copy"), ("mosaic", "us")
    found = []
    for dtype in ("float32", "bfloat16"):
        what = f"cast_transpose_amax, 8192x8192 {dtype}"
        found.append(Target("casts", what, of_copy, None, 0.85, "of the copy bandwidth", dtype == "bfloat16"))
        found.append(Target("casts", what, ("xla", "us"), us, 1.3, "times as fast as XLA"))
    adamw = "multi_tensor_update AdamW, {}".format
    kinds = ("float32", "float16 with float32 master", "bfloat16 with 16 bits of remainder")
    kinds = (*kinds, "bfloat16 with 8 bits of remainder, int8 moments")
    for what in ("unscale_and_check, float16", "unscale_and_check, float32", *map(adamw, kinds)):
        front = what in ("unscale_and_check, float16", adamw(kinds[1]))
        found.append(Target("tree", what, of_copy, None, 0.85, "of the copy bandwidth", front))
    for what in ("unscale_and_check, float32", "gradient_norm, float16", adamw(kinds[0])):
        found.append(Target("tree", what, ("torch", "us"), us, 1.0, "times as fast as torch"))
    step, fused = "optimizer step, GPT-2 small", ("jaxmp.fused_adamw, fp16", "us")
    by_hand = ("by hand, select: fp16 params, fp32 masters, clip, adamw", "us")
    found.append(Target("optimizer", step, by_hand, fused, 1.0, "times as fast as by hand", True))
    found.append(Target("optimizer", step, (fused[0], "of_copy"), None, 0.85, "of the copy bandwidth"))
    what = "Dense 8192x4096x4096, forward and backward"
    found.append(Target("dense", what, ("bf16", "us"), ("fp8", "us"), 1.5, "times as fast as bf16", True))
    what = "training step of a Llama layer, width 4096"
    found.append(Target("llama", what, ("bf16", "us"), ("fp8", "us"), 1.35, "times as fast as bf16", True))
    found.append(Target("llama", what, ("bf16", "peak_mib"), ("fp8", "peak_mib"), 1.0, "no more memory than bf16"))
    what = "apply_gradients, AdamW with masters"
    found.append(Target("offload", what, ("device", "peak_mib"), ("host", "peak_mib"), 1.2, "times less memory"))
    found.append(Target("offload", what, ("host", "us"), ("host, skipped", "us"), 5.0, "times faster when skipped"))
    what = "training step of stacked layers"
    found.append(Target("offload", what, ("host", "hidden"), None, 0.5, "of the copies hidden", True))
    for name in ("AdamW, float16 with masters", "AdamW, bfloat16 split, int8 moments"):
        what = f"multi_tensor_update {name}, 16 leaves"
        by = ("not taken", "us")
        found.append(Target("skipped", what, ("taken", "us"), by, 5.0, "times faster when not taken"))
    for what in ("gradient_norm, float16", "multi_tensor_update AdamW"):
        row, by = f"{what}, 37 leaves and one", ("37 leaves", "us")
        found.append(Target("leaves", row, ("one leaf", "us"), by, 0.85, "as fast as one leaf"))
    return found


# --- rows -------------------------------------------------------------------------------------------------------------


def rows_of(records: Iterable[Record]) -> dict[str, list[dict[str, Any]]]:
    """The rows by section, with what only several rows together tell: `of_copy`, and `hidden` of offload."""
    found = {record.data["section"]: [dict(row) for row in record.rows] for record in records}
    fastest = max((row["bytes_per_s"] for row in found.get("copy", []) if "bytes_per_s" in row), default=None)
    for row in (row for rows in found.values() for row in rows):
        if fastest and "bytes_per_s" in row:
            row["of_copy"] = row["bytes_per_s"] / fastest
    hidden_share(found.get("offload", []))
    return found


def hidden_share(rows: list[dict[str, Any]]) -> None:
    """Adds `hidden`: of the time that the copies take alone, the part that did not make the program longer.

    hidden = 1 - (host us - device us) / (bytes over the bus / bandwidth of the slower direction)
    """
    bus = [row["bus_bytes_per_s"] for row in rows if row["what"] == "copy over the bus"]
    by = {(row["what"], row["variant"]): row for row in rows}
    for (what, variant), row in by.items():
        beside = by.get((what, "device"))
        if bus and beside and variant == "host" and row.get("bus_bytes"):
            alone = row["bus_bytes"] / min(bus) * 1e6
            row["hidden"] = 1 - (row["us"] - beside["us"]) / alone


def targets(records: Sequence[Record]) -> list[dict[str, Any]]:
    """The targets of these sections with the measured values; `holds` is None if the comparison could not run here."""
    rows = rows_of(records)
    items = {record.data["section"]: record.items for record in records}
    found = []
    for target in all_targets():
        if target.section not in rows:
            continue
        by = {row["variant"]: row for row in rows[target.section] if row["what"] == target.what and "variant" in row}
        values = [by.get(variant, {}).get(field) for variant, field in filter(None, (target.of, target.by))]
        states = {
            items[target.section].get(f"{target.what}, {variant}", {}).get("state")
            for variant, _ in filter(None, (target.of, target.by))
        }
        got = None if None in values else values[0] / values[1] if target.by else values[0]
        holds = None if got is None and LEFT_OUT in states else got is not None and got >= target.least
        wanted = f"{target.least:g} {target.meaning}"
        found.append({"what": target.what, "wanted": wanted, "got": got, "holds": holds, "front": target.front})
    return found


def pays_from(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The least width above which fp8 is always faster than bf16, and the size of a Llama with that width."""
    widths: dict[int, dict[str, Any]] = {}
    for row in rows:
        if found := re.fullmatch(r"training step of a Llama layer, width (\d+)", row["what"]):
            widths.setdefault(int(found.group(1)), {})[row["variant"]] = row
    measured = {w: by for w, by in widths.items() if {"bf16", "fp8"} <= by.keys()}
    ratios = {w: by["bf16"]["us"] / by["fp8"]["us"] for w, by in sorted(measured.items())}
    width = None
    for w in sorted(ratios, reverse=True):
        if ratios[w] <= 1:
            break
        width = w
    if not ratios:
        return None
    layers = None if width is None else width // 128  # as in Llamas: 16 at 2048, 32 at 4096
    params = None if width is None else layers * measured[width]["fp8"]["params"]
    return {"width": width, "layers": layers, "params": params, "bf16_us_over_fp8_us": ratios}


# --- summary and junit ------------------------------------------------------------------------------------------------


def wrong(record: Record) -> list[tuple[str, str]]:
    """(item, what happened) of whatever did not pass, in one line each."""
    found = []
    if record.data["missing"]:
        found.append(("all of it", f"the package {record.data['missing']} is missing: --wheels FOLDER brings it"))
    elif record.data["error"]:
        found.append(("all of it", _line(record.data["error"])))
    for name, item in record.items.items():
        if item["state"] != PASSED:
            found.append((name, f"{item['state']}: {_line(item['text'])}"))
    return found


def _line(text: str) -> str:
    """The line of a traceback or of an output that says what happened."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    marked = [line[2:].strip() for line in lines if line.startswith("E ")]  # pytest's
    if marked or not lines:
        return (marked or [""])[0][:300]
    return (lines[0] if lines[0].startswith(("ended ", "still running")) else lines[-1])[:300]


def summary(records: Sequence[Record], machine: Mapping[str, Any]) -> str:
    """What passed, what failed, what is missing; as markdown."""
    cells = [["section", "result", "seconds", "items"]]
    for record in records:
        counts = ", ".join(f"{n} {state}" for state, n in record.counts().items())
        state = record.state() or "not run"
        cells.append([record.data["section"], state, f"{record.data['seconds']:.0f}", counts])
    parts = [f"{machine['device']}; missing packages: {', '.join(machine.get('missing', [])) or 'none'}"]
    parts.append(markdown(cells))
    bad = [f"* {r.data['section']}, {item}: {what}" for r in records for item, what in wrong(r)]
    if bad:
        parts.append("\n".join(["Left out or not passed:", "", *bad]))
    return "\n\n".join(parts)


def write_junit(path: Path, records: Sequence[Record]) -> None:
    """Every item as a test case, every section as a test suite."""
    root = ElementTree.Element("testsuites")
    for record in records:
        states = [item["state"] for item in record.items.values()]
        counts = {"tests": len(states), "failures": sum(s in BAD for s in states)}
        counts["skipped"] = sum(s in (LEFT_OUT, NO_TIME) for s in states)
        suite = ElementTree.SubElement(root, "testsuite", name=record.data["section"])
        suite.attrib |= {key: str(n) for key, n in counts.items()}
        for name, item in record.items.items():
            about = {"classname": record.data["section"], "name": name, "time": str(item["seconds"])}
            case = ElementTree.SubElement(suite, "testcase", about)
            if item["state"] != PASSED:
                kind = "failure" if item["state"] in BAD else "skipped"
                within = ElementTree.SubElement(case, kind, message=f"{item['state']}: {_line(item['text'])}")
                within.text = "".join(c for c in item["text"] if c >= " " or c in "\n\t")
        if record.data["error"]:
            case = ElementTree.SubElement(suite, "testcase", classname=record.data["section"], name="all of it")
            ElementTree.SubElement(case, "error", message=_line(record.data["error"])).text = record.data["error"]
    ElementTree.ElementTree(root).write(path, encoding="unicode", xml_declaration=True)


# --- tables -----------------------------------------------------------------------------------------------------------

COLUMNS = (
    ("us", "us", 1.0),
    ("of it host", "host_us", 1.0),
    ("GB/s", "bytes_per_s", 1e9),
    ("of a copy", "of_copy", 0.01),
    ("bus GB/s", "bus_bytes_per_s", 1e9),
    ("hidden", "hidden", 0.01),
    ("TFLOP/s", "flops_per_s", 1e12),
    ("k tokens/s", "tokens_per_s", 1e3),
    ("peak MiB", "peak_mib", 1.0),
)


def stored(folder: Path) -> list[Record]:
    """The records in the folder of one device, in the order of the sections."""
    from benchmarks.gpu.sections import SECTIONS

    found = [Record(path) for path in sorted(folder.glob("*.json"))]
    order = list(SECTIONS)
    return sorted(
        (r for r in found if not r.data.get("tiny") and r.rows + list(r.items)),
        key=lambda r: order.index(r.data["section"]) if r.data["section"] in order else len(order),
    )


def tables(folder: Path) -> str:
    """The results of one device as markdown: a table for each section, then the targets; "" without results."""
    records = stored(folder)
    parts = []
    for section, rows in rows_of(records).items():
        timed = [row for row in rows if "us" in row]
        columns = [c for c in COLUMNS if any(c[1] in row for row in timed)]
        if timed:
            cells = [[section, "by", *(head for head, _, _ in columns)]]
            for row in timed:
                numbers = [_number(row, field, unit) for _, field, unit in columns]
                cells.append([row["what"], row["variant"], *numbers])
            parts.append(markdown(cells))
    checks = [t for t in targets(records) if t["got"] is not None or t["holds"] is None]
    if checks:
        parts.append(markdown([["target", "at least", "got", "holds"], *map(_check_row, checks)]))
    found = pays_from(row for record in records for row in record.rows)
    if found:
        ratios = ", ".join(f"{ratio:.2f} at {width}" for width, ratio in found["bf16_us_over_fp8_us"].items())
        width = found["width"]
        says = "at no measured width" if width is None else f"from width {width} ({found['params'] / 1e9:.1f}e9 params)"
        parts.append(f"fp8 is faster than bf16 {says}: bf16's time over fp8's is {ratios}.")
    ended = [f"{r.data['section']} ({counts})" for r in records if (counts := _passed(r))]
    if parts or ended:
        parts.append("Passed: " + "; ".join(ended) + ".")
    notes = [f"* {r.data['section']}, {item}: {what}" for r in records for item, what in wrong(r)]
    if notes:
        parts.append("\n".join(["Left out or not passed:", "", *notes]))
    return "\n\n".join(parts)


def _passed(record: Record) -> str:
    counts = record.counts()
    return f"{counts[PASSED]} of {len(record.items)}" if counts.get(PASSED) else ""


def _check_row(t: Mapping[str, Any]) -> list[str]:
    words = {True: "yes", False: "no", None: "not measured"}
    return [t["what"], t["wanted"], "" if t["got"] is None else f"{t['got']:.2f}", words[t["holds"]]]


def _number(row: Mapping[str, Any], field: str, unit: float) -> str:
    if field not in row:
        return ""
    return f"{row[field] / unit:.1f}" if unit != 0.01 else f"{row[field]:.0%}"


def write(folder: Path, *, page: Path = README, front: Path = FRONT) -> int:
    """Writes the tables of all devices into both pages; returns the exit status."""
    long, short = [], []
    for device in sorted(path for path in folder.glob("*") if path.is_dir()):
        records = stored(device)
        text = tables(device)
        if not text:
            continue
        long.append(with_versions(text, records[0].data))
        rows = [_check_row(t)[:3] for t in targets(records) if t["front"] and t["got"] is not None]
        if rows:
            table = markdown([[f"on {records[0].data['device']}", "at least", "measured"], *rows])
            short.append(table)
    begin, end = markers("gpu")
    write_between(begin, end, "\n\n".join(long) or NOT_YET, page)
    if begin in front.read_text():
        write_between(begin, end, "\n\n".join(short), front)
    if not long:
        print(f"no results of a GPU under {folder}: nothing to write")
    return 0

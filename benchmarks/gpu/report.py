"""What the GPU run measured: a summary, the targets, junit, and the tables of README.md and benchmarks/README.md."""

# It reads the rows of a run, and needs Python alone.

import itertools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from benchmarks.gpu.sections import CAST_WAYS, CASTS, DENSE, OPTIMIZER, ROWS, SECTIONS, SIDES, STEP, STEPS
from benchmarks.lib import roofline
from benchmarks.lib.record import BAD, LEFT_OUT, NO_TIME, PASSED, Record, run_of, sources_of
from benchmarks.lib.tables import README, ROOT, markdown, markers, with_versions, write_between

FRONT = ROOT / "README.md"  # its table is the short one
NOT_YET = "No run on a GPU yet, so no times."
FILE, PICTURE = "rows.jsonl", "speedups.svg"


class Target(NamedTuple):
    """The least that a measured value has to reach.

    Attributes:
      section: the section that measures it.
      what: the rows with this name.
      of: (variant, field) of the value.
      by: (variant, field) to divide the value by, or None.
      least: the lower bound.
      meaning: the unit of the bound, in words.
    """

    section: str
    what: str
    of: tuple[str, str]
    by: tuple[str, str] | None
    least: float
    meaning: str


def all_targets() -> list[Target]:
    """All targets."""
    targets = []
    for dtype in ("float32", "bfloat16"):
        what = CASTS.format(8192, dtype)
        targets.append(Target("casts", what, ("mosaic", "of_copy"), None, 0.85, "of the copy bandwidth"))
        targets.append(Target("casts", what, ("xla", "us"), ("mosaic", "us"), 1.3, "times as fast as XLA"))
    fused, by_hand = "jaxmp.fused_adamw, fp16", "by hand, select: fp16 params, fp32 masters, clip, adamw"
    targets.append(Target("optimizer", OPTIMIZER, (by_hand, "us"), (fused, "us"), 1.0, "times as fast as by hand"))
    targets.append(Target("optimizer", OPTIMIZER, (fused, "of_copy"), None, 0.85, "of the copy bandwidth"))
    dense = DENSE.format(ROWS, *SIDES[0])
    for section, what, least in (("dense", dense, 1.5), ("llama", STEPS["Llama"], 1.35)):
        targets.append(Target(section, what, ("bf16", "us"), ("fp8 delayed", "us"), least, "times as fast as bf16"))
    for kind, what in STEPS.items():
        memory = ("bf16", "peak_mib"), ("fp8 delayed", "peak_mib")
        targets.append(Target(kind.lower(), what, *memory, 1.0, "no more memory than bf16"))
    what = "apply_gradients, AdamW with masters"
    targets.append(Target("offload", what, ("device", "peak_mib"), ("host", "peak_mib"), 1.2, "times less memory"))
    targets.append(Target("offload", what, ("host", "us"), ("host, skipped", "us"), 5.0, "times faster when skipped"))
    what = "training step of stacked layers"
    targets.append(Target("offload", what, ("host", "hidden"), None, 0.5, "of the copies hidden"))
    for name in ("AdamW, float16 with masters", "AdamW, bfloat16 split, int8 moments"):
        what = f"multi_tensor_update {name}, 16 leaves"
        ratio = ("taken", "us"), ("not taken", "us")
        targets.append(Target("skipped", what, *ratio, 5.0, "times faster when not taken"))
    return targets


# --- rows -------------------------------------------------------------------------------------------------------------


def rows_of(records: Iterable[Record]) -> dict[str, list[dict[str, Any]]]:
    """The rows by section, with what only several rows together tell: `of_copy`, and `hidden` of offload."""
    by_section = {record.section: [dict(row) for row in record.rows] for record in records}
    fastest = max((row["bytes_per_s"] for row in by_section.get("copy", []) if "bytes_per_s" in row), default=None)
    for row in (row for rows in by_section.values() for row in rows):
        if fastest and "bytes_per_s" in row:
            row["of_copy"] = row["bytes_per_s"] / fastest
    hidden_share(by_section.get("offload", []))
    return by_section


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
    """The targets of these sections with the measured values.

    `holds` is None where a program could not run here, or ran and does not have the value, as without `copy`.
    """
    rows = rows_of(records)
    items = {record.section: record.items for record in records}
    results = []
    for target in (target for target in all_targets() if target.section in rows):
        by = {row["variant"]: row for row in rows[target.section] if row["what"] == target.what and "variant" in row}
        fields = [field for field in (target.of, target.by) if field]
        values = [by.get(variant, {}).get(field) for variant, field in fields]
        names = [f"{target.what}, {variant}" for variant, _ in fields]
        states = [items[target.section].get(name, {}).get("state") for name in names]
        got = None if None in values else values[0] / values[1] if target.by else values[0]
        has_no_value = any(state == PASSED and v is None for state, v in zip(states, values, strict=True))
        is_unknown = LEFT_OUT in states or has_no_value
        holds = None if got is None and is_unknown else got is not None and got >= target.least
        least = f"{target.least:g} {target.meaning}"
        results.append({"what": target.what, "at least": least, "got": got, "holds": holds})
    return results


def pays_from(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The least width above which fp8 is always faster than bf16, and the size of a Llama with that width."""
    widths: dict[int, dict[str, Any]] = {}
    for row in rows:
        if match := re.fullmatch(STEP.format("Llama", r"(\d+)", 1), row["what"]):
            widths.setdefault(int(match.group(1)), {})[row["variant"]] = row
    pairs = {width: (by.get("bf16"), by.get("fp8 delayed")) for width, by in sorted(widths.items())}
    ratios = {width: bf16["us"] / fp8["us"] for width, (bf16, fp8) in pairs.items() if bf16 and fp8}
    if len(ratios) < 2:  # one width, that of the whole step, says nothing
        return None
    faster = itertools.takewhile(lambda width: ratios[width] > 1, sorted(ratios, reverse=True))
    width = min(faster, default=None)
    layers = None if width is None else width // 128  # as in Llamas: 16 at 2048, 32 at 4096
    params = None if width is None else width // 128 * widths[width]["fp8 delayed"]["params"]
    return {"width": width, "layers": layers, "params": params, "bf16_us_over_fp8_us": ratios}


# --- summary and junit ------------------------------------------------------------------------------------------------


def wrong(record: Record) -> list[tuple[str, str]]:
    """(item, what happened) of whatever did not pass, in one line each."""
    problems = []
    if record.about["missing"]:
        problems.append(("all of it", f"the package {record.about['missing']} is missing: --wheels FOLDER brings it"))
    elif record.about["error"]:
        problems.append(("all of it", _line(record.about["error"])))
    for name, item in record.items.items():
        if item["state"] != PASSED:
            problems.append((name, f"{item['state']}: {_line(item['text'])}"))
    return problems


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
        cells.append([record.section, state, f"{record.about['seconds']:.0f}", counts])
    parts = [f"{machine['device']}; missing packages: {', '.join(machine.get('missing', [])) or 'none'}"]
    parts.append(markdown(cells))
    bad = [f"* {r.section}, {item}: {what}" for r in records for item, what in wrong(r)]
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
        suite = ElementTree.SubElement(root, "testsuite", name=record.section)
        suite.attrib |= {key: str(n) for key, n in counts.items()}
        for name, item in record.items.items():
            about = {"classname": record.section, "name": name, "time": str(item["seconds"])}
            case = ElementTree.SubElement(suite, "testcase", about)
            if item["state"] != PASSED:
                kind = "failure" if item["state"] in BAD else "skipped"
                within = ElementTree.SubElement(case, kind, message=f"{item['state']}: {_line(item['text'])}")
                within.text = "".join(c for c in item["text"] if c >= " " or c in "\n\t")
        if record.about["error"]:
            case = ElementTree.SubElement(suite, "testcase", classname=record.section, name="all of it")
            ElementTree.SubElement(case, "error", message=_line(record.about["error"])).text = record.about["error"]
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
    """What the folder of one device has of each section, in the order of the sections; toy sizes count as nothing."""
    path = folder / FILE
    if run_of(path).get("tiny", True):
        return []
    return [record for record in (Record(path, name) for name in SECTIONS) if record.items]


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
    crossover = pays_from(row for record in records for row in record.rows)
    if crossover:
        ratios = ", ".join(f"{ratio:.2f} at {width}" for width, ratio in crossover["bf16_us_over_fp8_us"].items())
        width, params = crossover["width"], crossover["params"]
        where = "at no measured width" if width is None else f"from width {width} ({params / 1e9:.1f}e9 params)"
        parts.append(f"fp8 is faster than bf16 {where}: bf16's time over fp8's is {ratios}.")
    ended = [f"{r.section} ({counts})" for r in records if (counts := _passed(r))]
    if parts or ended:
        parts.append("Passed: " + "; ".join(ended) + ".")
    by_code: dict[str, list[str]] = {}
    for section, code in sources_of(folder / FILE).items():
        by_code.setdefault(code, []).append(section)
    if len(by_code) > 1:
        codes = [f"{', '.join(names)} with `{code}`" for code, names in by_code.items()]
        parts.append(f"Measured with several versions of the code: {'; '.join(codes)}.")
    notes = [f"* {r.section}, {item}: {what}" for r in records for item, what in wrong(r)]
    if notes:
        parts.append("\n".join(["Left out or not passed:", "", *notes]))
    return "\n\n".join(parts)


def _passed(record: Record) -> str:
    counts = record.counts()
    return f"{counts[PASSED]} of {len(record.items)}" if counts.get(PASSED) else ""


def _check_row(t: Mapping[str, Any]) -> list[str]:
    words = {True: "yes", False: "no", None: "not measured"}
    return [t["what"], t["at least"], "" if t["got"] is None else f"{t['got']:.2f}", words[t["holds"]]]


def _number(row: Mapping[str, Any], field: str, unit: float) -> str:
    if field not in row:
        return ""
    return f"{row[field] / unit:.1f}" if unit != 0.01 else f"{row[field]:.0%}"


def write(folder: Path, *, page: Path = README, front: Path = FRONT) -> int:
    """Writes the tables of all devices into both pages; returns the exit status."""
    devices = [path for path in sorted(folder.glob("*")) if tables(path)]
    begin, end = markers("gpu")
    texts = []
    for device in devices:
        texts += [with_versions(short(device, page.parent), run_of(device / FILE)), tables(device)]
    write_between(begin, end, "\n\n".join(texts) or NOT_YET, page)
    if begin in front.read_text():
        write_between(begin, end, "\n\n".join(filter(None, map(front_table, devices))), front)
    if not devices:
        print(f"no results of a GPU under {folder}: nothing to write")
    return 0


# --- the short answer: a table and a picture --------------------------------------------------------------------------


class Answer(NamedTuple):
    """A line of the short table, and a bar of its picture if there is a speedup."""

    what: str
    measured: str
    us: float | None = None
    least_us: float | None = None  # by roofline
    speedup: float | None = None


def answers(records: Sequence[Record], device: str) -> list[Answer]:
    """What a reader asks first, as far as it was measured; in the order of the sections."""
    rows = {(row["what"], row["variant"]): row for rows in rows_of(records).values() for row in rows if "us" in row}
    lines = []
    for record in records:
        if record.section in ("right", "correctness"):
            of = f"{record.counts().get(PASSED, 0)} of {len(record.items)} passed"
            lines.append(Answer(f"right: {SECTIONS[record.section].about}", of))
    gemms = [DENSE.format(ROWS, *sides) for sides in SIDES]
    precisions = list(dict.fromkeys(variant for what, variant in rows if what in gemms))
    for about, whats in ((f"Dense {SIDES[0][0]}x{SIDES[0][1]}", gemms[:1]), ("12 GEMMs of a layer", gemms)):
        for precision in precisions:
            lines += _of_many(about, [(rows.get((w, "bf16")), rows.get((w, precision))) for w in whats], device)
    for kind, what in STEPS.items():
        for row in (row for (w, _), row in rows.items() if w == what):
            lines += _of_step(kind, row, rows.get((what, "bf16")), device)
    for (what, variant), row in rows.items():
        if what == OPTIMIZER and variant.startswith("jaxmp.fused_adamw, fp16"):
            others = {v: r for (w, v), r in rows.items() if w == what and not v.startswith("jaxmp")}
            for short_name, start in (("by hand", "by hand"), ("optax, float32 params", "optax.clip")):
                times = [r["us"] for v, r in others.items() if v.startswith(start)]
                if times:
                    lines.append(_beside(f"optimizer, fp16, beside {short_name}", min(times), row, device))
        if what == CAST_WAYS.format(ROWS, *SIDES[0]) and variant == row["table"]:
            lines += _of_ways(rows, row)
        if what in (CASTS.format(8192, "float32"), CASTS.format(8192, "bfloat16")) and variant == "mosaic":
            beside = rows.get((what, "xla"))
            if beside:
                about = f"`{what.split(',')[0]}`, {what.split()[-1]}, beside cast and XLA's transpose"
                lines.append(_beside(about, beside["us"], row, device))
    return lines


def _of_many(
    about: str, pairs: Sequence[tuple[dict[str, Any] | None, dict[str, Any] | None]], device: str
) -> list[Answer]:
    """The rows of a precision together beside those of bf16; none if one is missing."""
    both = [(a, b) for a, b in pairs if a and b]
    if len(both) < len(pairs):
        return []
    before, after = (sum(row["us"] for row in column) for column in zip(*both, strict=True))
    least = [roofline.least_us(row, device) for _, row in both]
    first = both[0][1]
    speedup = None if first is both[0][0] else before / after
    whole = None if None in least else sum(filter(None, least))
    return [Answer(f"{about}, {first['variant']}", f"{after / 1e3:.2f} ms", after, whole, speedup)]


def _of_ways(rows: Mapping[tuple[str, str], dict[str, Any]], first: Mapping[str, Any]) -> list[Answer]:
    """The 12 GEMMs of a layer with casts in the way of the table, beside the other way; none if a row is missing."""
    table = first["table"]
    other = next((v for w, v in rows if w == first["what"] and v != table), "")
    whats = [CAST_WAYS.format(ROWS, *sides) for sides in SIDES]
    if any((what, way) not in rows for what in whats for way in (table, other)):
        return []
    mine, others = (sum(rows[what, way]["us"] for what in whats) for way in (table, other))
    return [_beside(f"12 GEMMs, casts in {table} (`fp8/cast_ways.py`), beside {other}", others, {"us": mine})]


def _of_step(kind: str, row: dict[str, Any], bf16: dict[str, Any] | None, device: str) -> list[Answer]:
    parts = [f"{row['us'] / 1e3:.1f} ms, {row['tokens_per_s'] / 1e3:.1f} k tokens/s"]
    parts += [f"{row['peak_mib'] / 1024:.1f} GiB"] if "peak_mib" in row else []
    speedup = bf16["us"] / row["us"] if bf16 and bf16 is not row else None
    return [
        Answer(f"{kind} step, {row['variant']}", ", ".join(parts), row["us"], roofline.least_us(row, device), speedup)
    ]


def _beside(about: str, other_us: float, row: Mapping[str, Any], device: str = "") -> Answer:
    says = "faster" if row["us"] < other_us else "slower"
    text = f"{says}: {row['us']:.0f} us, the other {other_us:.0f} us"
    return Answer(about, text, row["us"], roofline.least_us(row, device), other_us / row["us"])


def short(folder: Path, page_folder: Path) -> str:
    """The picture and the short table of one device, as markdown for a page in `page_folder`; "" without results.

    It draws the picture, too.
    """
    device = run_of(folder / FILE).get("device", "")
    lines = answers(stored(folder), device)
    if not lines:
        return ""
    (folder / PICTURE).write_text(picture([a for a in lines if a.speedup], f"times as fast, on {device}"))
    cells = [[f"on {device}", "measured", "times as fast", "by roofline", "of it"]]
    for a in lines:
        speedup = "" if a.speedup is None else f"{a.speedup:.2f}"
        cells.append([a.what, a.measured, speedup, *_beside_roofline(a)])
    where = Path(os.path.relpath(folder / PICTURE, page_folder)).as_posix()
    return f"![Speedups on {device}]({where})\n\n{markdown(cells)}"


def front_table(folder: Path) -> str:
    """What fp8 gains on one device, in a few rows for README.md; "" without results."""
    device = run_of(folder / FILE).get("device", "")
    gains = [a for a in answers(stored(folder), device) if a.speedup and a.what.endswith("fp8 delayed")]
    if not gains:
        return ""
    cells = [[f"on {device}", "in fp8", "times as fast as bf16"]]
    cells += [[a.what.removesuffix(", fp8 delayed"), a.measured, f"{a.speedup:.2f}"] for a in gains]
    return markdown(cells)


def _beside_roofline(answer: Answer) -> tuple[str, str]:
    """The least time, and its share of the measured one."""
    if answer.us is None or answer.least_us is None:
        return "", ""
    text = f"{answer.least_us / 1e3:.2f} ms" if answer.least_us >= 1e3 else f"{answer.least_us:.0f} us"
    return text, f"{answer.least_us / answer.us:.0%}"


def picture(bars: Sequence[Answer], title: str) -> str:
    """An SVG with a bar for each speedup, and a line at 1."""
    left, right, high, top = 460, 330, 22, 40
    most = max([bar.speedup or 0.0 for bar in bars] + [1.0])
    unit = right / most
    text = '<text x="{:.0f}" y="{:.0f}" text-anchor="{}"{}>{}</text>'.format
    parts = [text(left, 20, "start", ' font-weight="bold"', escape(title))]
    for i, bar in enumerate(bars):
        y, wide = top + i * high, (bar.speedup or 0.0) * unit
        color = "#3f51b5" if wide >= unit else "#b0413e"
        parts.append(text(left - 8, y + 12, "end", "", escape(bar.what.replace("`", ""))))
        parts.append(f'<rect x="{left}" y="{y}" width="{wide:.1f}" height="{high - 6}" fill="{color}"/>')
        parts.append(text(left + wide + 6, y + 12, "start", "", f"{bar.speedup:.2f}"))
    bottom = top + len(bars) * high
    one = left + unit
    parts.append(
        f'<line x1="{one:.1f}" y1="{top - 8}" x2="{one:.1f}" y2="{bottom}" stroke="#555" stroke-dasharray="4"/>'
    )
    size = f'width="{left + right + 60}" height="{bottom + 10}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    ground = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([head, ground, *parts, "</svg>"]) + "\n"

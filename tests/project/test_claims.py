"""What pages say of speed and memory is in a table of benchmarks/, and names its row."""

# A claim is a link: its text has the numbers, its target is a section of benchmarks/README.md, one of its own page,
# or a file of benchmarks/results, and its title is the row, `'first cell'` or `'first cell; another cell'`, without
# double quotes. That the tables are those of the stored results is test_benchmarks.py's.

import functools
import json
import re

import pytest

from helpers import ROOT

TABLES, RESULTS = ROOT / "benchmarks" / "README.md", ROOT / "benchmarks" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "CHANGELOG.md", TABLES]
CLAIM = re.compile(r"\[([^\]]+)\]\(([^)\s]+) '([^']+)'\)")
NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?!\.?\w)")  # none in bf16, 4096x4096


def file_of(page, target):
    """The file, from the root of the project, that a link leads to; with its section."""
    path, _, anchor = target.partition("#")
    return f"{(page.parent / path).resolve().relative_to(ROOT) if path else page.relative_to(ROOT)}#{anchor}"


CLAIMS = [
    (str(page.relative_to(ROOT)), claim, file_of(page, target), title)
    for page in PAGES
    for claim, target, title in CLAIM.findall(page.read_text())
]


@functools.cache
def rows_of(target):
    """The rows of a section's tables, or of a stored result, as lists of cells."""
    path, _, anchor = target.partition("#")
    text = (ROOT / path).read_text()
    if path.endswith(".json"):
        stored = json.loads(text)
        rows = stored["rows"] if "rows" in stored else [{"of": of, **row} for of, row in stored["summary"].items()]
        return [[str(cell) for cell in row.values()] for row in rows]
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        if re.sub(r"[^\w\- ]", "", section.splitlines()[0].lower()).replace(" ", "-") == anchor:
            lines = [line for line in section.splitlines() if line.startswith("| ")]
            return [[cell.strip().replace('"', "") for cell in line.strip("| ").split(" | ")] for line in lines]
    raise AssertionError(f"no section {anchor!r}")


def stands_in(claim, row):
    """Whether all numbers of a text are in a row, rounded to the digits that the text has."""
    numbers = [float(number) for cell in row for number in NUMBER.findall(cell)]
    digits = [(float(number), len(number.partition(".")[2])) for number in NUMBER.findall(claim)]
    return bool(digits) and all(any(round(x, d) == number for x in numbers) for number, d in digits)


@pytest.mark.parametrize("target", sorted({target for _, _, target, _ in CLAIMS}))
def test_claims_are_numbers_of_the_rows_that_they_name(target):
    wrong = []
    for page, claim, _, title in (fields for fields in CLAIMS if fields[2] == target):
        first, *others = title.split("; ")
        named = [row for row in rows_of(target) if row[0] == first and set(others) <= set(row)]
        if not any(stands_in(claim, row) for row in named):
            wrong.append(f"{page}: {claim!r} is not in {title!r}: {named}")
    assert wrong == []


MEASURED = re.compile(
    r"\d\s(?:[MGK]i?B(?:/s)?|ms|launches|TFLOP/s)\b|\d\sbytes?\s(?:per|for\seach|for\severy|a)\sparam"
    r"|\d\s(?:times|%)\s(?:faster|slower|as\s(?:fast|long)|the\splan|of\s(?:bf16|bfloat16|float32))|\d\stimes\sin\s16"
    r"|\d\s?%\s(?:more|fewer|less)\b|\.\d+\s(?:\(\w+\)\s)?(?:(?:and|to)\s\d+\.\d+\s(?:\(\w+\)\s)?)?(?:of|times)\s(?!them\b)"
)
# No measurement: sizes that the reader chooses or hardware has, and sums of dtypes that the code of the page shows.
CALCULATED = {
    "docs/explanation/synchronization.md": ("2 more bytes for each param", "4 bytes for each param instead of 2"),
    "docs/how-to/installation.md": ("A T4 has 16 GB",),
    "docs/how-to/job/loop.md": ("989 TFLOP/s for an H100",),
    "docs/how-to/memory/memory.md": ("float32 sums of the gradients, 4 bytes for each parameter",),
    "docs/how-to/memory/offload.md": ("`window_bytes` (256 MiB)", "0.5 s at 25 GB/s"),
    "docs/how-to/precision/optimizers.md": ("This stores 10 bytes per parameter",),
    "docs/how-to/precision/policies.md": ("5 bytes per parameter in place of 14",),
    "docs/warnings.md": ("this leaf then take 8 bytes for each param",),
    "benchmarks/README.md": (
        "at most 1.05 of the time of the cast by hand",  # a target, as the next three
        "trace + lower + compile at most 1.3 of the float32",
        "at most 1.03 of the step without a monitor",
        "bf16 takes at most 1.02 times as long as by hand",
        "small ones, up to 1 KiB",
        "at 650 TFLOP/s in 16 bits",
        "reading 128 MiB of fp8 weights twice and writing 512 MiB of gradients",
        "the casts of rows (8 MiB each)",
        "up to 1 MiB of partial sums",
        "makes that folder, 3 MiB",
        "20 launches of each kernel",
    ),
    "docs/how-to/step/sharding.md": ("a mixed-precision step needs 16 or 18 bytes for every parameter",),
}


def claims_without_a_row(page):
    text = re.sub(
        r"^```.*?^```$|<!-- [\w ]+: written by .*?: end -->", "", page.read_text(), flags=re.DOTALL | re.MULTILINE
    )
    text = re.sub(r"\s+", " ", CLAIM.sub("", text))
    for allowed in CALCULATED.get(str(page.relative_to(ROOT)), ()):
        assert allowed in text
        text = text.replace(allowed, "")
    return [text[max(0, match.start() - 60) : match.end() + 20] for match in MEASURED.finditer(text)]


def test_no_page_claims_a_number_without_its_row():
    assert {str(page): claims for page in PAGES if (claims := claims_without_a_row(page))} == {}


def test_wrong_claims_are_found():
    row = ["jaxmp.fused_adamw, fp16", "1 device", "30.04", "16", "0 small"]
    assert stands_in("16 launches", row) and stands_in("30 bytes", row) and stands_in("30.0", row)
    assert not stands_in("17 launches", row) and not stands_in("30.1", row) and not stands_in("fp16", row)
    assert MEASURED.search("it moves 352 MiB") and MEASURED.search("20.7 bytes per parameter")
    assert len(CLAIMS) > 40

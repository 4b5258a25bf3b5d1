"""Checks each page: no list, table or fence of its Markdown stands in a paragraph as text, as after a missing line."""

import logging
import re

LOG = logging.getLogger("mkdocs.markup")  # a warning is an error under `mkdocs build --strict`
CODE = re.compile(r"<(pre|code)\b.*?</\1>", re.DOTALL)
TAG = re.compile(r"<[^>]+>")
LEFT = re.compile(r"^(?:[*-] |\| |```).*", re.MULTILINE)


def leftovers(html: str) -> list[str]:
    """Lines of a page that are Markdown still."""
    return LEFT.findall(TAG.sub("", CODE.sub("…", html)))


def on_page_content(html, page, **kwargs):
    """Warns of each such line."""
    for line in leftovers(html):
        LOG.warning("%s shows Markdown as text; it needs an empty line before: %s", page.file.src_uri, line[:80])

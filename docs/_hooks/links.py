"""Checks the built site: every link and picture of every page leads to a file that is there, and to an id in it."""

import logging
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOG = logging.getLogger("mkdocs.links")  # a warning is an error under `mkdocs build --strict`


class Page(HTMLParser):
    """The ids of a page, and where its links lead."""

    def __init__(self, text: str):
        super().__init__()
        self.ids: set[str] = set()
        self.links: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        """Reads one tag."""
        found = dict(attrs)
        self.ids |= {found[name] for name in ("id", "name") if found.get(name)}
        self.links |= {found[name] for name in ("href", "src") if found.get(name)}


def faults(site: Path) -> list[str]:
    """Links of the pages below a folder that lead nowhere; links to other hosts are left alone."""
    pages = {path: Page(path.read_text()) for path in site.rglob("*.html")}
    found = []
    for path, page in pages.items():
        for link in sorted(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or path.name == "404.html":  # its links are those of a server's root
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            wrong_id = parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids
            if not target.exists() or (wrong_id and not parts.fragment.startswith("__")):  # the theme's own
                found.append(f"{path.relative_to(site)}: {link}")
    return sorted(found)


def on_post_build(config):
    """Warns of each link that leads nowhere."""
    for fault in faults(Path(config.site_dir).resolve()):
        LOG.warning("a link leads nowhere: %s", fault)

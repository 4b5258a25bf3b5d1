"""The reference: pages made from what the packages export (names.py), which mkdocstrings fills from the docstrings."""

import re

from mkdocs.structure.files import File

from names import first_line, groups_of, namespaces, pages, results, summary_of


def page_text(page: str, title: str, names: list[str]) -> str:
    """A page as mkdocstrings reads it."""
    lines = [f"# {title}", ""]
    if title in namespaces():
        lines += [
            f"::: {title}",
            "    options: {members: false, show_root_heading: false, show_root_toc_entry: false}",
            "",
        ]
    else:
        lines += [summary_of(page), ""]
    for group, found in groups_of(page, names):
        lines += [f"## {group}", ""] if group else []
        level = 3 if group else 2
        for name in found:
            lines += [f"::: {name}", f"    options: {{heading_level: {level}}}", ""]
            for path in results().get(name, ()):
                options = f"{{heading_level: {level + 1}, show_root_full_path: false}}"
                lines += [f"::: {path}", f"    options: {options}", ""]
    return "\n".join(lines)


def index_text() -> str:
    """All names with what they are for, by page."""
    lines = [
        "# Reference",
        "",
        "Every public name, with an example that runs in the tests. These pages are made from the docstrings.",
        "",
    ]
    for page, (title, names) in pages().items():
        what = summary_of(page)
        lines += [f"## [{title}]({page}.md)", "", *([what, ""] if what else []), "| name | what it is |", "|---|---|"]
        for group, found in groups_of(page, names):
            lines += [f"| **{group}** | |"] if group else []
            for name in found:
                short = name.removeprefix(f"{title}.").removeprefix("jaxmp.")
                lines.append(f"| [`{short}`][{name}] | {first_line(name).replace('|', chr(92) + '|')} |")
        lines.append("")
    return "\n".join(lines)


def on_config(config):
    """Fills the navigation's `Reference`."""
    listed = ["reference/index.md", *({title: f"reference/{page}.md"} for page, (title, _) in pages().items())]
    next(entry for entry in config.nav if "Reference" in entry)["Reference"] = listed
    return config


def on_files(files, config):
    """Adds the pages."""
    texts = {"index": index_text()} | {page: page_text(page, *content) for page, content in pages().items()}
    for page, text in texts.items():
        files.append(File.generated(config, f"reference/{page}.md", content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    """Links `jaxmp.name` in the text of all other pages to its entry, but not in code, headings and links."""
    if page.file.src_uri.startswith("reference/"):
        return markdown
    names = "|".join(re.escape(name) for _, found in pages().values() for name in found)
    kept = r"(^```.*?^```$|^ {4}[^\n]*$|^#[^\n]*$|\[[^\]]*\]\([^)]*\))"
    parts = re.split(kept, markdown, flags=re.MULTILINE | re.DOTALL)
    parts[::2] = [re.sub(rf"(?<!\[)`({names})`", r"[`\1`][\1]", part) for part in parts[::2]]
    return "".join(parts)

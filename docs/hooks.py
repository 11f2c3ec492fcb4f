"""What MkDocs does beside rendering ``docs/``: generated pages, and links that leave the folder.

The reference is made by ``docs/reference.py``. Files of the repository that pages link to and that
are Markdown become pages of the site; other files and folders are named, but not linked.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(Path(__file__).parent), str(ROOT / "examples")]

import cells  # noqa: E402 - beside this file, as the next
import reference  # noqa: E402

# Pages of the site made from files outside docs/, by their paths from the root.
PROJECT = {
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
}
RESULTS = {
    f"benchmarks/results/{path.name}": f"results/{path.name}"
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.md"))
}
OUTSIDE = PROJECT | RESULTS
_LINK = re.compile(r"(?<!!)\[([^\]\n]+(?:\n[^\]\n]+)?)\]\(([^)\s]+)\)")

_FILE = re.compile(r"^<!-- file: (\S+) -->$", re.M)  # where a file of the repository is shown


def generated() -> dict[str, str]:
    """Return the pages that are in no file, by where they stand in the site."""
    pages = {f"reference/{name}.md": reference.module(name) for name in reference.MODULES}
    pages["reference/command-line.md"] = reference.command_line()
    pages["reference/compressors.md"] = reference.compressors()
    for source, target in OUTSIDE.items():
        pages[target] = (ROOT / source).read_text()
    return pages


def _section(config: Any, title: str) -> list[Any]:
    for entry in config.nav:
        if title in entry:
            if not isinstance(entry[title], list):
                raise SystemExit(f"mkdocs.yml: {title} is no section")
            return list(entry[title])
    raise SystemExit(f"mkdocs.yml has no section {title}")


def _extend(config: Any, title: str, pages: list[dict[str, str]]) -> None:
    section = _section(config, title) + pages
    config.nav = [{title: section} if title in entry else entry for entry in config.nav]


def on_config(config: Any) -> Any:
    """Add the generated pages to the navigation."""
    modules = [{name: f"reference/{name}.md"} for name in reference.MODULES]
    _extend(config, "Reference", modules)
    _extend(config, "Benchmarks", [{Path(s).stem.replace("_", " "): t} for s, t in RESULTS.items()])
    _extend(config, "Project", [{_title(ROOT / s): t} for s, t in PROJECT.items()])
    return config


def _title(path: Path) -> str:
    first = path.read_text().partition("\n")[0].removeprefix("# ")
    return first.partition(" (")[0].partition(": ")[0]


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages to the site."""
    for target, text in generated().items():
        files.append(File.generated(config, target, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Return a page's text with links out of ``docs/`` led to pages of the site."""
    place = page.file.src_uri
    sources = {target: source for source, target in OUTSIDE.items()}
    # Where the text's own relative links count from, in the repository.
    folder = posixpath.dirname(sources.get(place, f"docs/{place}"))
    here = posixpath.dirname(place)

    def led(match: re.Match[str]) -> str:
        text, link = match.groups()
        if "://" in link or link.startswith(("#", "mailto:")):
            return match[0]
        path, mark, anchor = link.partition("#")
        path = posixpath.normpath(posixpath.join(folder, path))
        if path.startswith("docs/"):
            target = path.removeprefix("docs/")
        elif path in OUTSIDE:
            target = OUTSIDE[path]
        elif path == "README.md":
            target = "index.md"
        elif path == "benchmarks/results":
            target = "benchmarks.md"
        elif (ROOT / path).exists():
            return text if "`" in text else f"{text} (`{path}`)"
        else:
            return match[0]  # which MkDocs complains of
        return f"[{text}]({posixpath.relpath(target, here or '.')}{mark}{anchor})"

    return _FILE.sub(_shown, _LINK.sub(led, markdown))


def _shown(match: re.Match[str]) -> str:
    return f'```python title="{match[1]}"\n{(ROOT / match[1]).read_text()}```\n'


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Return a page's HTML without the backslashes that Markdown's tables want before a pipe."""
    return cells.unescaped(html)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Return a page's HTML with places where code in a table's cell may break.

    Last of all, because the search would take the pieces of a name for words of their own.
    """
    return cells.breakable(output)

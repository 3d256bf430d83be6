"""Hooks for mkdocs: put the README first, and make a page of every repository file that a page links to."""

from __future__ import annotations

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

DOCS = Path(__file__).parent
ROOT = DOCS.parent
LINK = re.compile(r'(\]\(|^\[[^\]]+\]: |src=")([\w./-]+)', re.MULTILINE)
IMAGES = {".png", ".svg"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the pages by texts whose links work in the site, and add the files that they link to."""
    paths = [ROOT / "README.md", *DOCS.rglob("*.md")]
    for path in paths:  # grows
        text, targets = page_of(path)
        paths += sorted(targets.difference(paths))
        if page := files.get_file_from_path(uri_of(path)):
            files.remove(page)
        files.append(File.generated(config, uri_of(path), content=text))
    return files


def uri_of(path: Path) -> str:
    """Return where the site has a file of the repository, relative to its pages."""
    if path == ROOT / "README.md":
        return "index.md"
    if path.is_relative_to(DOCS):
        return path.relative_to(DOCS).as_posix()
    return f"repository/{path.relative_to(ROOT).as_posix()}.md"


def page_of(path: Path) -> tuple[str, set[Path]]:
    """Return the Markdown of a file's or directory's page, and the files that need pages for its links."""
    name = path.relative_to(ROOT).as_posix()
    head, targets = f"---\ntitle: {name}\nsearch: {{exclude: true}}\n---\n", set()
    if path.is_dir():
        names = sorted(file.name for file in path.iterdir() if file.is_file())
        text, base = "".join(f"- [{name}]({name})\n" for name in names if name[0] not in "._"), path
    elif path.suffix != ".md":
        return f"{head}````{path.suffix[1:]}\n{path.read_text('utf-8')}````\n", set()
    else:
        text, base = path.read_text("utf-8"), path.parent

    def in_site(match: re.Match[str]) -> str:
        target = (base / match[2]).resolve()
        if not target.exists():
            return match[0]
        if target.suffix not in IMAGES:
            targets.add(target)
        return match[1] + os.path.relpath(uri_of(target), Path(uri_of(path)).parent)

    text = LINK.sub(in_site, text)
    is_repository = uri_of(path).startswith("repository/")
    return head * is_repository + text, targets

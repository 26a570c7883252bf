"""Hooks of `mkdocs.yml`: two pages from the root, and links to files that are not part of the site.

Pages are written to be read in the repository too. There, a link such as `../src/cdc_replay/errors.py` leads
to a file; on the site it becomes the file's name.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import TYPE_CHECKING, Final

from mkdocs.structure.files import File, Files

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

ROOT: Final = Path(__file__).resolve().parents[1]
ROOT_PAGES: Final = ("CONTRIBUTING.md", "CHANGELOG.md")

_LINK: Final = re.compile(r"\[([^\]\n]+)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the root."""
    for name in ROOT_PAGES:
        files.append(File.generated(config, name, content=(ROOT / name).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, files: Files, **_: object) -> str:
    """Make links lead to pages of the site, or be names of files."""
    folder = PurePosixPath("." if page.file.src_uri in ROOT_PAGES else "docs") / page.file.src_uri
    inside = PurePosixPath(page.file.src_uri).parent

    def replace(match: re.Match[str]) -> str:
        label, target, anchor = match[1], match[2], match[3] or ""
        if target.startswith(("https://", "http://")):
            return match[0]
        path = normpath(str(folder.parent / target))
        uri = path.removeprefix("docs/")
        if files.get_file_from_path(uri) is None:
            return label if (ROOT / path).exists() else match[0]
        return f"[{label}]({'../' * len(inside.parts)}{uri}{anchor})"

    return _LINK.sub(replace, markdown)

"""The documentation site: complete, without dead links, and without anything from the internet.

`make lint` builds it too, since a dead link is an error of the build.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from fixtures.airflow import ROOT

LOADED: Final = re.compile(
    r"<(?:script|img|iframe)\b[^>]*\bsrc=[\"']?(?:https?:)?//|<link\b[^>]*\brel=[\"']?(?:stylesheet|preconnect|icon)"
    r"[^>]*\bhref=[\"']?(?:https?:)?//"
)
"""Elements for which a browser asks another host."""


def build(folder: Path, config: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--config-file", config, "--site-dir", folder],
        cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    process = build(folder)
    assert process.returncode == 0, process.stderr
    return folder


def test_every_page_is_there(site: Path) -> None:
    pages = {str(path.relative_to(ROOT / "docs").with_suffix("")) for path in (ROOT / "docs").rglob("*.md")}
    pages = {re.sub(r"README$", "index", page) for page in pages} | {"CONTRIBUTING", "CHANGELOG"}
    assert {str(path.relative_to(site).with_suffix("")) for path in site.rglob("*.html")} == pages | {"404"}


def test_nothing_is_loaded_from_the_internet(site: Path) -> None:
    for page in site.rglob("*.html"):
        assert LOADED.search(page.read_text(encoding="utf-8")) is None, page.name


def test_search_works_from_disk(site: Path) -> None:
    """A browser reads no JSON from disk: the index is a script, and workers are iframes."""
    assert "SlotLost" in (site / "search" / "search_index.js").read_text(encoding="utf-8")
    assert "iframe-worker.js" in (site / "index.html").read_text(encoding="utf-8")


def test_rules_have_their_anchors(site: Path) -> None:
    assert 'id="R4.6"' in (site / "semantics.html").read_text(encoding="utf-8")


def test_dead_link_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(
        "# One\n\n[two](two.md) and [three](#three)\n", encoding="utf-8"
    )
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[0]
    settings = re.sub(r"^(?:hooks|docs_dir|exclude_docs):.*\n", "", settings, flags=re.MULTILINE)
    (tmp_path / "mkdocs.yml").write_text(settings, encoding="utf-8")
    process = build(tmp_path / "site", tmp_path / "mkdocs.yml")
    assert process.returncode != 0
    assert "'two.md'" in process.stderr
    assert "'#three'" in process.stderr

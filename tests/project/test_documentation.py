"""The documentation says what is there: commands, keys, targets, rules, columns, links, examples."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Final

import pyarrow as pa
import pytest
import yaml

import reference_pages
import semantics_page
from cdc_replay import config as configuration
from cdc_replay.airflow.gauges import GAUGES
from cdc_replay.changelog.header import LogHeader
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.changelog.segment import LOG_SCHEMA
from cdc_replay.failpoints import FAILPOINTS
from cdc_replay.model.database import Database
from cdc_replay.model.frames import CHANGES, LOG, NET, ROUTED, Frame
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.relation import QualifiedName, Relation, RelationColumn, RelationId, ReplicaIdentity
from cdc_replay.model.results import ReplayResult

ROOT: Final = Path(__file__).resolve().parents[2]
README: Final = ROOT / "README.md"
DOCS: Final = ROOT / "docs"
PAGES: Final = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "tests" / "conformance" / "scenarios").glob("*.md"),
    ]
)
FOLDERS: Final = ("src", "tests", "docs", "dags", "plugins", "jobs", "demo", "docker", "tools")

PACKAGE: Final = ROOT / "src" / "cdc_replay"
PROPERTIES: Final = {"catalog", "capture"} | GAUGES.keys()
"""Words behind `cdc_replay.` that are not packages: the prefix of messages, for example."""

IN_CODE: Final = re.compile(r"`([^`\n]+)`")
LINK: Final = re.compile(r"\]\(([^)\s]+)\)")
FOREIGN: Final = re.compile(
    r"pypi|pythonhosted|index-url|repo\.maven|(?:^|[\s\"'=(`])/(?:work|root|home|Users)/\w", re.MULTILINE
)
"""Hosts of package registries, and folders of somebody's machine."""


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def code_blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text(path), re.MULTILINE | re.DOTALL)


def make_targets() -> set[str]:
    process = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return {line.split()[1] for line in process.stdout.splitlines()}


def named_targets(page: Path) -> set[str]:
    return set(re.findall(r"(?:`| {4})make ([a-z-]+)", text(page)))


def test_make_targets_in_pages_exist_and_contributing_names_all() -> None:
    targets = make_targets()
    for page in PAGES:
        assert named_targets(page) <= targets, page.name
    assert targets - {"help"} <= named_targets(ROOT / "CONTRIBUTING.md")


def test_readme_is_short() -> None:
    assert len(text(README).splitlines()) <= 130


def test_reference_pages_are_up_to_date() -> None:
    assert text(reference_pages.COMMANDS) == reference_pages.render_commands(), "run `make docs`"
    assert text(reference_pages.CONFIGURATION) == reference_pages.render_configuration(), "run `make docs`"
    assert text(reference_pages.METRICS) == reference_pages.render_metrics(), "run `make docs`"


def test_every_key_has_a_meaning() -> None:
    assert [key for key, _, meaning in reference_pages.configuration_keys() if not meaning] == []


def test_commands_in_the_text_exist() -> None:
    known = reference_pages.commands()
    for page in PAGES:
        for verb in re.findall(r"^(?: {4})?cdc-replay ([a-z-]+)", text(page), re.MULTILINE):
            assert verb in known, f"{page.name}: {verb}"
        for token in IN_CODE.findall(text(page)):
            if (match := re.match(r"cdc-replay ([a-z-]+)", token)) is not None:
                assert match[1] in known, f"{page.name}: {token}"


def test_example_configuration_is_valid_and_shows_every_key() -> None:
    example = ROOT / "cdc_replay.example.yaml"
    configuration.load_config(example)
    shown: set[str] = set()
    above: list[tuple[int, str]] = []
    for line in text(example).splitlines():
        if match := re.match(r"( *)(?:# |- )?(\w+):", line):
            above = [(indent, key) for indent, key in above if indent < len(match[1])]
            above.append((len(match[1]), match[2]))
            path = ".".join(key for _, key in above)
            shown.add(re.sub(r"^(publishers|subscriptions|groups)\.\w+\.", r"\1.", path))
    for subscription in yaml.safe_load(text(example))["subscriptions"].values():
        validation = subscription["validation"]
        shown |= {f"subscriptions.validation.{key}" for key in validation}
        for table in validation["tables"].values():
            shown |= {f"subscriptions.validation.tables.TABLE.{key}" for key in table}
    keys = {key.replace(".NAME.", ".") for key, _, _ in reference_pages.configuration_keys()}
    assert keys - {"subscriptions.dsn"} <= shown


@pytest.mark.parametrize("page", [README, DOCS / "tutorial.md"], ids=lambda page: page.name)
def test_configurations_in_the_text_are_valid(page: Path, tmp_path: Path) -> None:
    blocks = code_blocks(page, "yaml")
    assert blocks
    for number, block in enumerate(blocks):
        file = tmp_path / f"{number}.yaml"
        file.write_text(block, encoding="utf-8")
        configuration.load_config(file)


def test_json_of_the_commands_page_has_the_form_of_a_result() -> None:
    (block,) = code_blocks(reference_pages.COMMANDS, "json")
    assert list(json.loads(block)) == [field.name for field in dataclasses.fields(ReplayResult)]


def test_environment_variables_and_dags_in_the_text_exist() -> None:
    folders = ("src", "plugins", "dags", "tools", "tests")
    sources = "".join(text(path) for folder in folders for path in (ROOT / folder).rglob("*.py"))
    for page in PAGES:
        content = text(page)
        for name in set(re.findall(r"\bCDC_REPLAY_\w+[A-Z]", content)):
            assert f'"{name}' in sources, f"{page.name}: {name}"
        for prefix in set(re.findall(r"`([a-z]+__)[<…]", content)):
            assert f'f"{prefix}{{' in sources, f"{page.name}: {prefix}"


def module_exists(name: str) -> bool:
    """Whether `name`, with slashes or dots, is a module or package of ours, or a name in a module."""
    parts = name.removesuffix(".py").replace(".", "/").split("/")
    whole, parent = PACKAGE.joinpath(*parts), PACKAGE.joinpath(*parts[:-1]).with_suffix(".py")
    if whole.is_dir() or whole.with_suffix(".py").is_file():
        return True
    return (
        parent.is_file()
        and re.search(rf"^(?:class|def) {parts[-1]}\b", text(parent), re.MULTILINE) is not None
    )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_modules_that_pages_name_exist(page: Path) -> None:
    """`replay/route` and `replay.decode` do; names of Spark's settings, failpoints and keys look alike."""
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")} - {"spark"}
    for token in IN_CODE.findall(text(page)):
        name = token.removeprefix("cdc_replay.")
        if token in FAILPOINTS or (token.startswith("cdc_replay.") and name in PROPERTIES):
            continue
        if re.fullmatch(r"\w+(?:[./]\w+)+", name) and re.split(r"[./]", name)[0] in packages:
            assert module_exists(name), token


def anchors(path: Path) -> set[str]:
    prose = re.sub(r"^```.*?^```", "", text(path), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    anchored = set(re.findall(r'<a id="([^"]+)"></a>', prose))
    return anchored | {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(text(page)):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target
    for path in IN_CODE.findall(text(page)):
        if path.split("/")[0] in FOLDERS and re.fullmatch(r"[\w./-]+", path) and "/" in path:
            assert (ROOT / path).exists(), path


def test_pictures_are_small_and_need_nothing_else() -> None:
    for picture in (ROOT / "docs" / "images").iterdir():
        assert picture.stat().st_size < 300_000
    drawing = text(ROOT / "docs" / "images" / "flow.svg").replace('xmlns="http://www.w3.org/2000/svg"', "")
    assert not re.search(r"https?://|@import|href", drawing)


def test_no_file_names_a_package_registry_or_somebodys_folder() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    for name in listed.stdout.split("\0"):
        path = ROOT / name
        if path == Path(__file__) or not path.is_file() or path.suffix in {".png", ".parquet"}:
            continue
        assert FOREIGN.findall(text(path)) == [], name


def test_semantics_page_is_up_to_date_and_names_known_rules_only() -> None:
    assert text(semantics_page.PAGE) == semantics_page.render(), "run `make docs`"


def test_every_rule_has_an_anchor() -> None:
    known = {rule for section in semantics_page.rules().values() for rule in section}
    assert known <= anchors(semantics_page.PAGE)


def test_rules_that_pages_cite_are_in_the_list() -> None:
    known = {rule for section in semantics_page.rules().values() for rule in section}
    for page in PAGES:
        assert set(re.findall(r"\bR\d+\.\d+", text(page))) <= known, page.name


@pytest.mark.parametrize(
    ("heading", "frame"),
    [("LOG", LOG), ("CHANGES", CHANGES), ("ROUTED", ROUTED), ("NET", NET)],
    ids=["LOG", "CHANGES", "ROUTED", "NET"],
)
def test_architecture_has_every_column_of_a_frame(heading: str, frame: Frame) -> None:
    section = re.search(rf"\n### {heading}:.*?(?=\n##)", text(ROOT / "docs" / "architecture.md"), re.DOTALL)
    assert section is not None
    documented: list[str] = []
    for line in section[0].splitlines():
        if line.startswith("| `"):
            documented += IN_CODE.findall(line.split("|")[1])
    assert sorted(documented) == sorted(frame.names)


def test_architecture_tells_every_failpoint_and_layer() -> None:
    page = text(ROOT / "docs" / "architecture.md")
    assert {name for name in FAILPOINTS if f"`{name}`" not in page} == set()
    with (ROOT / "pyproject.toml").open("rb") as file:
        contracts = tomllib.load(file)["tool"]["importlinter"]["contracts"]
    (flow,) = [contract for contract in contracts if contract["id"] == "flow"]
    layers = [line.strip() for line in page.splitlines() if line.startswith("    ")]
    assert layers[0] == f"dags, plugins, jobs, {flow['layers'][0]}"
    assert layers[1:] == flow["layers"][1:]


MESSAGE: Final = b"I\x00\x00\x40\x05N\x00\x02t\x00\x00\x00\x0212n"


@pytest.fixture
def shop_log(tmp_path: Path) -> Path:
    """A log with one INSERT of (12, NULL), where the page says that it is."""
    folder = tmp_path / "var" / "change_log" / "shop"
    log = ChangeLog.create(str(folder), LogHeader("1", 1, "cdc_replay_shop", Lsn(100), Database(5, "shop")))
    columns = (RelationColumn("id", 23, -1, is_key=True), RelationColumn("t", 25, -1, is_key=False))
    name = QualifiedName("public", "orders")
    log.add_relations({7: Relation(RelationId(0x4005), 7, name, ReplicaIdentity.DEFAULT, columns)})
    row = {"commit_lsn": 200, "commit_time": 1, "xid": 1, "origin": None, "seq": 0, "lsn": 190, "kind": "I",
           "relation_id": 0x4005, "relation_version": 7, "message": MESSAGE}  # fmt: skip
    segments = log.write([pa.RecordBatch.from_pylist([row], schema=LOG_SCHEMA)])
    log.commit(segments, Lsn(200))
    return tmp_path


def test_change_log_is_read_as_its_page_says(shop_log: Path) -> None:
    reading, decoding = code_blocks(ROOT / "docs" / "change-log.md", "python")
    process = subprocess.run(
        [sys.executable, "-c", f"{reading}\n{decoding}\nprint(values_of_insert({MESSAGE!r}))"],
        cwd=shop_log, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert process.stdout.splitlines() == ["ends at 0xc8", "public.orders I 1", "['12', None]"], (
        process.stderr
    )

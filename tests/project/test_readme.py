"""The documentation says what is there: commands, keys, targets, rules, columns, links, examples."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pytest
import typer
import yaml

import semantics_page
from cdc_replay import config as configuration
from cdc_replay.changelog.header import LogHeader
from cdc_replay.changelog.log import ChangeLog
from cdc_replay.changelog.segment import LOG_SCHEMA
from cdc_replay.cli import app
from cdc_replay.failpoints import FAILPOINTS
from cdc_replay.model.duration import parse_duration
from cdc_replay.model.frames import CHANGES, LOG, NET, ROUTED, Frame
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.relation import QualifiedName, Relation, RelationColumn, RelationId, ReplicaIdentity
from cdc_replay.model.results import ReplayResult
from cdc_replay.model.subscription import Subscription

ROOT: Final = Path(__file__).resolve().parents[2]
README: Final = ROOT / "README.md"
PAGES: Final = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "tests" / "conformance" / "scenarios").glob("*.md"),
    ]
)
FOLDERS: Final = ("src", "tests", "docs", "dags", "plugins", "jobs", "demo", "docker", "tools")

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


def table_rows(path: Path, heading: str) -> Iterator[list[str]]:
    """The body rows of the tables below a heading."""
    section = text(path).partition(f"\n{heading}\n")[2]
    assert section, heading
    section = re.split(r"\n## ", section)[0]
    for line in section.splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if cells and not set(cells[0]) <= {"-", " "}:
            yield cells


def make_targets() -> set[str]:
    done = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return {line.split()[1] for line in done.stdout.splitlines()}


@pytest.mark.parametrize("page", [README, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_make_targets_exist_and_are_all_named(page: Path) -> None:
    content = text(page)
    sentence = re.search(r"lists the other targets: ([^.]*)\.", content)
    named = set(re.findall(r"\bmake ([a-z-]+)", content))
    named |= set(IN_CODE.findall(sentence[1])) if sentence else set()
    targets = make_targets()
    assert named <= targets
    assert targets - {"help"} <= named


def commands() -> dict[str, set[str]]:
    """The command line's verbs with their options."""
    group: Any = typer.main.get_command(app)
    return {
        name: {option for parameter in command.params for option in parameter.opts if option.startswith("--")}
        for name, command in group.commands.items()
    }


def test_commands_are_those_of_the_command_line_with_their_options() -> None:
    common = {"--config", "--log-level", "--json", "--help"}
    named: dict[str, set[str]] = {}
    for first, *_ in table_rows(README, "## Commands"):
        if (match := re.match(r"`([a-z-]+)", first)) is not None:
            named[match[1]] = set(re.findall(r"--[a-z-]+", first))
    assert named == {name: options - common for name, options in commands().items()}


def test_commands_in_the_text_exist() -> None:
    known = commands()
    for page in PAGES:
        for verb in re.findall(r"^(?: {4})?cdc-replay ([a-z-]+)", text(page), re.MULTILINE):
            assert verb in known, f"{page.name}: {verb}"
        for code in IN_CODE.findall(text(page)):
            if (match := re.match(r"cdc-replay ([a-z-]+)", code)) is not None:
                assert match[1] in known, f"{page.name}: {code}"


def configuration_keys() -> set[str]:
    kinds = {
        "publishers": (configuration.PublisherConfig,),
        "subscriptions": (configuration.SubscriptionConfig, Subscription),
        "groups": (configuration.GroupConfig,),
        "timeouts": (configuration.Timeouts,),
    }
    derived = {"publishers.name", "subscriptions.name", "subscriptions.subscription"}
    derived |= {"groups.name", "groups.publisher", "groups.subscriptions"}
    keys = {
        f"{section}.{field.name.removesuffix('_text')}"
        for section, classes in kinds.items()
        for config_class in classes
        for field in dataclasses.fields(config_class)
    }
    return keys - derived


def documented_defaults() -> dict[str, str]:
    rows = table_rows(README, "## Configuration")
    defaults = {first.strip("`").replace(".NAME.", "."): default.strip("`") for first, default, *_ in rows}
    return {key: default for key, default in defaults.items() if "." in key}


def test_configuration_reference_is_complete_and_has_the_defaults(tmp_path: Path) -> None:
    documented = documented_defaults()
    assert set(documented) == configuration_keys()
    file = tmp_path / "cdc_replay.yaml"
    file.write_text(
        "publishers: {NAME: {dsn: x, change_log: log}}\n"
        "subscriptions: {OTHER: {dsn: x, publisher: NAME, publications: [p]}}\n",
        encoding="utf-8",
    )
    loaded = configuration.load_config(file)
    (publisher,), (subscription,) = loaded.publishers.values(), loaded.subscriptions.values()
    (group,) = loaded.groups.values()
    values: dict[str, list[Any]] = {
        "publishers": [publisher],
        "subscriptions": [subscription.subscription, subscription],
        "groups": [group],
        "timeouts": [loaded.timeouts],
    }
    for key, default in documented.items():
        section, _, name = key.partition(".")
        if default in {"", "required", "the publisher", "on new changes"}:
            continue
        (value,) = [getattr(holder, name) for holder in values[section] if hasattr(holder, name)]
        plain = getattr(value, "value", value)
        expected = "cdc_replay_name" if name == "slot" else yaml.safe_load(default)
        expected = parse_duration(default) if isinstance(plain, dt.timedelta) else expected
        assert plain == expected, key
    assert (group.name, group.schedule) == ("NAME", None)


def test_example_configuration_is_valid_and_shows_every_key() -> None:
    example = ROOT / "cdc_replay.example.yaml"
    configuration.load_config(example)
    shown, section = set(), ""
    for line in text(example).splitlines():
        if match := re.match(r"(\w+):", line):
            section = match[1]
        elif match := re.match(r" {2}(\w+):" if section == "timeouts" else r" {4}(?:# )?(\w+):", line):
            shown.add(f"{section}.{match[1]}")
    assert configuration_keys() - {"subscriptions.dsn"} <= shown


def test_configurations_in_the_readme_are_valid(tmp_path: Path) -> None:
    blocks = code_blocks(README, "yaml")
    assert blocks
    for index, block in enumerate(blocks):
        file = tmp_path / f"{index}.yaml"
        file.write_text(block, encoding="utf-8")
        configuration.load_config(file)


def test_json_in_the_readme_has_the_form_of_a_result() -> None:
    (block,) = code_blocks(README, "json")
    assert list(json.loads(block)) == [field.name for field in dataclasses.fields(ReplayResult)]


def test_environment_variables_and_dags_in_the_readme_exist() -> None:
    sources = "".join(
        text(path) for folder in ("src", "plugins", "dags", "tools") for path in (ROOT / folder).rglob("*.py")
    )
    content = text(README)
    for name in set(re.findall(r"\bCDC_REPLAY_\w+", content)):
        assert f'"{name}"' in sources, name
    for prefix in set(re.findall(r"`([a-z]+__)<", content)):
        assert f'f"{prefix}{{' in sources, prefix


def anchors(path: Path) -> set[str]:
    prose = re.sub(r"^```.*?^```", "", text(path), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(text(page)):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target
    for code in IN_CODE.findall(text(page)):
        if code.split("/")[0] in FOLDERS and re.fullmatch(r"[\w./-]+", code) and "/" in code:
            assert (ROOT / code).exists(), code


def test_pictures_are_small_and_self_contained() -> None:
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
        if path == Path(__file__) or not path.is_file() or path.suffix == ".png":
            continue
        assert FOREIGN.findall(text(path)) == [], name


def test_semantics_page_is_up_to_date_and_names_known_rules_only() -> None:
    assert text(semantics_page.PAGE) == semantics_page.render(), "run `make docs`"


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


def test_architecture_page_has_every_failpoint_and_layer() -> None:
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
    log = ChangeLog.create(str(folder), LogHeader("1", 1, "cdc_replay_shop", Lsn(100)))
    columns = (RelationColumn("id", 23, -1, is_key=True), RelationColumn("t", 25, -1, is_key=False))
    name = QualifiedName("public", "orders")
    log.add_relations({7: Relation(RelationId(0x4005), 7, name, ReplicaIdentity.DEFAULT, columns)})
    row = {"commit_lsn": 200, "commit_time": 1, "xid": 1, "origin": None, "seq": 0, "lsn": 190, "kind": "I",
           "relation_id": 0x4005, "relation_version": 7, "message": MESSAGE}  # fmt: skip
    segments = log.write([pa.RecordBatch.from_pylist([row], schema=LOG_SCHEMA)])
    log.commit(segments, Lsn(200))
    return tmp_path


def test_change_log_is_readable_as_its_page_describes(shop_log: Path) -> None:
    reading, decoding = code_blocks(ROOT / "docs" / "change-log.md", "python")
    done = subprocess.run(
        [sys.executable, "-c", f"{reading}\n{decoding}\nprint(values_of_insert({MESSAGE!r}))"],
        cwd=shop_log, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.splitlines() == ["ends at 0xc8", "public.orders I 1", "['12', None]"], done.stderr

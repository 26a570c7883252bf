"""The generator of random cases: one seed one world, and everything that it promises occurs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from conformance.random_cases import report
from conformance.random_cases.publications import Publication
from conformance.random_cases.shrink import shrunk
from conformance.random_cases.tables import Family, Identity, Layout
from conformance.random_cases.values import KINDS
from conformance.random_cases.world import World, as_scenario, only, world
from conformance.scenario import load_scenario

WORLDS = [world(seed, version) for version in (150000, 180000) for seed in range(150)]


def depth(family: Family) -> int:
    """How many levels of partitions."""
    parents = {table.sql: table.parent for table in family.tables}

    def above(name: str) -> int:
        parent = parents[name]
        return 0 if parent is None else 1 + above(parent)

    return 0 if family.inherits else max(above(table.sql) for table in family.tables)


def statements(world: World) -> Iterator[str]:
    for phase in world.phases:
        for transaction in phase:
            for part in transaction.parts:
                yield from (statement.sql for statement in part.statements)


def of_tables(world: World) -> Iterator[str]:
    for family in world.families:
        yield f"levels {depth(family)}"
        yield "inheritance" if family.inherits else "no inheritance"
        yield "key" if family.key else "no key"
        yield from (f"type {column.kind.sql}" for column in family.columns)
        for table in family.tables:
            yield f"identity {table.identity.value}"
            yield "dropped column" if table.dropped_at is not None else "all columns"
            yield "other order" if table.order != tuple(sorted(table.order)) else "same order"
            yield "other schema" if table.schema != family.top.schema else "same schema"
        if family.top.identity is not family.leaves[0].identity:
            yield "identities differ"
        for column in family.columns:
            if column.generation:
                yield "virtual column" if column.is_virtual else "stored column"
            if column.storage:
                yield "big value"


def of_publications(world: World) -> Iterator[str]:
    for publication in world.publications:
        yield from _of(publication)
    by_name = {publication.name: publication for publication in world.publications}
    for subscription in world.subscriptions:
        chosen = [by_name[name] for name in subscription.publications]
        yield f"{len(chosen)} publications"
        yield f"layout {subscription.layout.value}"
        yield f"copy_data {subscription.copy_data}"
        yield "mixed via root" if len({each.via_root for each in chosen}) > 1 else "one level"


def _of(publication: Publication) -> Iterator[str]:
    yield f"publishes {len(publication.actions)} actions"
    yield "all tables" if publication.all_tables else "some tables"
    yield "schema" if publication.schemas else "no schema"
    yield "schema and tables" if publication.schemas and publication.members else "one kind"
    yield "publishes generated columns" if publication.publish_generated else "does not"
    for member in publication.members:
        yield "filter" if " where " in member.clause else "no filter"
        yield "list" if f"{member.table} (" in member.clause else "no list"


def of_workload(world: World) -> Iterator[str]:
    yield f"{len(world.phases) - 1} syncs after the first"
    yield "rows before" if world.phases[0] else "no rows before"
    yield from (" ".join(statement.split()[:1]) for statement in statements(world))
    for phase in world.phases:
        for transaction in phase:
            yield "commits" if transaction.commits else "rolls back"
            yield from ("kept" if part.kept else "rolled back to savepoint" for part in transaction.parts)


def test_everything_that_is_promised_is_drawn() -> None:
    found = {
        feature
        for each in WORLDS
        for feature in (*of_tables(each), *of_publications(each), *of_workload(each))
    }
    wanted = {
        *(f"levels {levels}" for levels in range(4)),
        *(f"identity {identity.value}" for identity in Identity),
        *(f"type {kind.sql}" for kind in KINDS),
        *(f"layout {layout.value}" for layout in Layout),
        *(f"publishes {count} actions" for count in (1, 2, 3, 4)),
        *(f"{count} publications" for count in (1, 2, 3)),
        *("insert", "update", "delete", "truncate", "copy", "rolled back to savepoint", "rolls back"),
        *("inheritance", "no key", "dropped column", "other order", "other schema", "identities differ"),
        *(
            "stored column",
            "virtual column",
            "big value",
            "filter",
            "list",
            "schema and tables",
            "all tables",
        ),
        *("mixed via root", "publishes generated columns", "no rows before", "copy_data False"),
    }
    assert wanted <= found, wanted - found


def test_every_change_of_definitions_is_drawn() -> None:
    redefined = [world(seed, 180000, redefined=True) for seed in range(40)]
    found = {statement for each in redefined for statement in statements(each) if statement[:5] == "alter"}
    words = (
        *("add table", "drop table", "set table", "publish =", "publish_via_partition_root ="),
        *("replica identity full", "replica identity default", "attach partition", "detach partition"),
        *("add column", "drop column", "rename column", "type bigint", "type int"),
    )
    missing = [
        each
        for each in words
        if not any(f" {each}" in statement or f"({each}" in statement for statement in found)
    ]
    assert not missing


def test_a_seed_gives_the_same_world_every_time() -> None:
    assert WORLDS[:150] == [world(seed, 150000) for seed in range(150)]
    assert len({repr(each.phases) for each in WORLDS[150:]}) == 150


def test_a_world_is_made_as_small_as_its_failure_allows() -> None:
    """The failure is planted: a TRUNCATE beside a publication of all tables."""

    def fails(candidate: World) -> bool:
        truncates = any(statement.startswith("truncate") for statement in statements(candidate))
        return truncates and any(publication.all_tables for publication in candidate.publications)

    failing = next(each for each in WORLDS if fails(only(each, "s1")))
    small = shrunk(only(failing, "s1"), fails, tries=500)

    assert [statement.split()[0] for statement in statements(small)] == ["truncate"]
    assert any(publication.all_tables for publication in small.publications)
    assert len(small.publications) <= len(failing.publications)


def test_a_failing_world_is_printed_as_a_scenario_that_can_be_loaded(tmp_path: Path) -> None:
    for each in WORLDS[150:170]:
        text = report.script(only(each, "s1"))
        file = tmp_path / f"random_{each.seed}.yaml"
        file.write_text(text.partition("\n\n")[2], encoding="utf-8")
        assert load_scenario(file) == as_scenario(only(each, "s1"))

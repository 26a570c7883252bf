"""Whoever owns a published table can replace it at any moment, and none of their code runs then (R2.1).

Between a command's look at the catalog and its reading, the owner gives the table's name to a view, or a
column to a type with a cast. Either calls a function that writes a file on the publisher's host if it runs
with the rights of the role that reads.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from cdc_replay.commands.refresh import refresh
from cdc_replay.commands.snapshot import snapshot
from cdc_replay.commands.sync import sync
from cdc_replay.commands.validate import validate
from cdc_replay.errors import CdcReplayError
from integration.commands.twin import Twin
from security.stranger import Stranger

pytestmark = pytest.mark.spark

TABLE = "create table t (id int primary key, a int, body text)"

TRAP = """
    create function trap() returns boolean language plpgsql as $$
    begin
        if current_user <> '{owner}' then
            execute format('copy (select 1) to %L', current_setting('data_directory') || '/{file}');
        end if;
        return true;
    end $$
"""

BY_VIEW = "alter table t rename to hidden; create view t as select * from hidden where trap()"

BY_TYPE = """
    create type evil as enum ('11');
    create function cast_of(evil) returns int language plpgsql as $$ begin return public.trap()::int; end $$;
    create cast (evil as int) with function cast_of(evil) as implicit;
    alter table t drop column a cascade;
    alter table t add column a evil default '11'
"""
"""The filter of the plan compares a number."""

REPLACED = {"view": BY_VIEW, "type": BY_TYPE}


@dataclass(frozen=True)
class Owner:
    """The stranger, who owns table `t`, and the trap."""

    stranger: Stranger

    @property
    def file(self) -> str:
        return f"trap_of_{self.stranger.name}"

    def has_run_code(self) -> bool:
        """Whether the trap has run with other rights than the owner's."""
        query = f"select (pg_stat_file('{self.file}', true)).size is not null"
        [(answer,)] = self.stranger.database.rows(query)
        return bool(answer)


@pytest.fixture
def owner(stranger: Stranger) -> Owner:
    stranger.database.run(f"grant create on schema public to {stranger.name}")
    made = Owner(stranger)
    stranger.run(f"set search_path = public; {TABLE}; alter table t alter body set storage external")
    stranger.run("set search_path = public;" + TRAP.format(owner=stranger.name, file=made.file))
    stranger.run(
        "insert into public.t select n, n + 10, repeat(chr(96 + n), 3000) from generate_series(1, 5) n"
    )
    stranger.database.run("create publication p for table t where (a > 10)")
    return made


def subscribe(twin: Twin) -> None:
    twin.subscribe("s", "p", tables=TABLE, native=False)


def synced(twin: Twin) -> None:
    subscribe(twin)
    sync(twin.config, ["s"])


@pytest.fixture
def before(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, Callable[[], None]], None]:
    """Does something before a function is called for the first time."""

    def arrange(name: str, act: Callable[[], None]) -> None:
        module, _, attribute = name.rpartition(".")
        place = importlib.import_module(module)
        original: Callable[..., Any] = getattr(place, attribute)

        @functools.wraps(original)
        def changed(*arguments: object, **options: object) -> object:
            monkeypatch.setattr(place, attribute, original)
            act()
            return original(*arguments, **options)

        monkeypatch.setattr(place, attribute, changed)

    return arrange


READERS: dict[str, tuple[Callable[[Twin], None], str, Callable[[Twin], object]]] = {
    "snapshot": (
        subscribe,
        "cdc_replay.snapshot.load.tasks",
        lambda twin: snapshot(twin.config, "s"),
    ),
    "validate": (
        synced,
        "cdc_replay.commands.validate.validate_subscription",
        lambda twin: validate(twin.config, "s"),
    ),
    "reconcile": (
        synced,
        "cdc_replay.commands.refresh.reconcile_tables",
        lambda twin: refresh(twin.config, "s", reconcile=True),
    ),
    "preview": (
        synced,
        "cdc_replay.commands.refresh.preview_tables",
        lambda twin: refresh(twin.config, "s", reconcile=True, dry_run=True),
    ),
}


@pytest.mark.parametrize("script", REPLACED.values(), ids=REPLACED)
@pytest.mark.parametrize("reader", READERS)
def test_a_table_that_is_replaced_before_it_is_read_is_not_read(
    twin: Twin, owner: Owner, before: Callable[[str, Callable[[], None]], None], reader: str, script: str
) -> None:
    prepare, place, command = READERS[reader]
    prepare(twin)
    before(place, lambda: replace(owner, script))

    said = what_is_said(lambda: command(twin))

    assert not owner.has_run_code()
    assert 'cannot read table "public.t" of the publisher' in said, said


def replace(owner: Owner, script: str) -> None:
    owner.stranger.run(f"set search_path = public; {script}")


def what_is_said(command: Callable[[], object]) -> str:
    try:
        return str(command())
    except CdcReplayError as error:
        return str(error)

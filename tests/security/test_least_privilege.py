"""Roles that own nothing and are no superusers do everything, after an administrator has run two scripts.

The scripts are those that `setup --dry-run` prints for a role that may only log in.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import pytest

from cdc_replay.commands.backfill import backfill
from cdc_replay.commands.refresh import refresh
from cdc_replay.commands.setup import setup, subscriber_script
from cdc_replay.commands.teardown import teardown
from cdc_replay.commands.validate import validate
from cdc_replay.errors import MissingPrivilege
from cdc_replay.terminal.setup_view import to_script
from fixtures.postgres import run_as_administrator
from fixtures.twin import Pair, Twin
from security.stranger import Stranger

pytestmark = pytest.mark.spark

PUBLISHED = """
    create schema "Shop";
    create table "Shop".t (id int primary key, a int, note text);
    create table "Shop".parts (id int, a int, primary key (id, a)) partition by range (a);
    create table "Shop".parts_low partition of "Shop".parts for values from (0) to (100);
    create table "Shop".parts_high partition of "Shop".parts for values from (100) to (1000);
    alter table "Shop".t replica identity full;
    insert into "Shop".t select n, n, 'note' from generate_series(1, 20) n;
    insert into "Shop".parts select n, n * 10 from generate_series(1, 20) n
"""
PUBLICATIONS = """
    create publication p for table "Shop".t where (note ~ 'no+te' and a > 5);
    create publication q for table "Shop".parts with (publish_via_partition_root)
"""
SUBSCRIBED = """
    create schema "Shop";
    create table "Shop".t (id int primary key, a int, note text);
    create index on "Shop".t (a);
    create table "Shop".parts (id int, a int, primary key (id, a)) partition by range (a);
    create table "Shop".parts_all partition of "Shop".parts default
"""
TRAFFIC = """
    update "Shop".t set a = a - 10 where id in (3, 15);
    update "Shop".t set a = 50 where id = 1;
    update "Shop".t set id = 100 - id where id in (8, 9);
    delete from "Shop".t where id = 20;
    insert into "Shop".parts values (500, 500);
    update "Shop".parts set a = a + 100 where id = 7;
    truncate "Shop".parts;
    insert into "Shop".parts values (1, 1), (2, 200)
"""


@dataclass(frozen=True)
class Roles:
    """Those of the configuration, and the owners of the tables."""

    twin: Twin
    capture: Stranger
    apply: Stranger
    owner: Stranger
    """Of the subscriber's tables."""


@pytest.fixture
def roles(twin: Twin) -> Iterator[Roles]:
    """Tables belong to roles of their own on both sides; ours may only log in."""
    ours, native = twin.database(), twin.database(SUBSCRIBED)
    publisher_owner = Stranger(twin.publisher, f"owner_{twin.publisher.name}")
    capture = Stranger(twin.publisher, f"capture_{twin.publisher.name}")
    prepared = Roles(
        twin, capture, Stranger(ours, f"apply_{ours.name}"), Stranger(ours, f"owner_{ours.name}")
    )
    everybody = (publisher_owner, prepared.capture, prepared.apply, prepared.owner)
    for role in everybody:
        role.enter()
    for owner, tables in ((publisher_owner, PUBLISHED), (prepared.owner, SUBSCRIBED)):
        owner.database.run(f"grant create on database {owner.database.name} to {owner.name}")
        owner.run(tables)
    twin.publisher.run(PUBLICATIONS)
    twin.options["dsn"] = capture.dsn
    twin.pairs["s"] = Pair(ours, native, ("p", "q"), {"dsn": prepared.apply.dsn})
    yield prepared
    with suppress(MissingPrivilege):
        teardown(twin.config, "s")
    twin.options["dsn"] = twin.publisher.dsn
    teardown(twin.config, "pub")
    for role in everybody:
        role.leave()


def scripts(roles: Roles) -> None:
    """What `setup --dry-run` prints for both sides, run by their administrators."""
    config = roles.twin.config
    run_as_administrator(roles.twin.publisher, to_script(setup(config, "pub", dry_run=True)))
    run_as_administrator(roles.apply.database, to_script(subscriber_script(config, "pub", "s")))


def test_a_teardown_by_a_role_that_owns_nothing_removes_nothing(roles: Roles) -> None:
    twin = roles.twin
    scripts(roles)
    setup(twin.config, "pub")
    ours = "select (select count(*) from pg_replication_slots), (select count(*) from pg_publication)"
    before = twin.publisher.rows(ours)

    with pytest.raises(MissingPrivilege, match="must be owner of") as refused:
        teardown(twin.config, "pub")

    assert "Nothing was removed" in str(refused.value.hint)
    assert twin.publisher.rows(ours) == before


@pytest.mark.parametrize("run_as_owner", [False, True])
def test_roles_without_rights_do_everything_after_two_scripts(roles: Roles, run_as_owner: bool) -> None:
    twin = roles.twin
    twin.change("s", run_as_owner=run_as_owner)
    scripts(roles)

    done = setup(twin.config, "pub")
    assert (done.statements, done.warnings, done.event_trigger) == ((), (), True)
    assert subscriber_script(twin.config, "pub", "s").statements == ()
    twin.native("s").create(("p", "q"), {})
    twin.sync()
    before = twin.sync_ours("s")[0].replay.to_lsn
    twin.publish(TRAFFIC)
    upto = twin.sync()["s"].to_lsn

    for table in ('"Shop".t', '"Shop".parts'):
        twin.rows("s", table)
    assert validate(twin.config, "s").success
    reconciled = refresh(twin.config, "s", reconcile=True, confirm=lambda _: True)
    assert reconciled.warnings == ()
    assert backfill(twin.config, "s", str(before), str(upto)).changes_read > 0
    twin.rows("s", '"Shop".t')
    assert not any(role.is_superuser() for role in (roles.capture, roles.apply))
    assert (
        roles.apply.run(
            "select relname from pg_class where relowner = current_user::regrole"
            " and relnamespace <> 'cdc_replay'::regnamespace and relnamespace <> 'pg_toast'::regnamespace"
        )
        == []
    )


def test_without_the_scripts_each_step_says_what_it_lacks(roles: Roles) -> None:
    with pytest.raises(MissingPrivilege, match="lacks the attribute REPLICATION"):
        setup(roles.twin.config, "pub")
    run_as_administrator(roles.twin.publisher, to_script(setup(roles.twin.config, "pub", dry_run=True)))
    setup(roles.twin.config, "pub")

    with pytest.raises(MissingPrivilege, match='cannot create schema "cdc_replay"') as refused:
        roles.twin.sync_ours("s")
    assert "setup PUBLISHER --dry-run --subscription NAME" in (refused.value.hint or "")


def test_superuser_roles_are_warned_of(twin: Twin) -> None:
    twin.publisher.run("create table t (id int primary key); create publication p for table t")
    twin.subscribe("s", "p", tables="create table t (id int primary key)", native=False)

    warnings = setup(twin.config, "pub").warnings

    assert [
        'publisher pub: role "postgres" is a superuser' in warnings[0],
        "subscription s: role" in warnings[1],
    ] == [True, True]
    [of_subscriber] = subscriber_script(twin.config, "pub", "s").warnings
    assert "is a superuser" in of_subscriber

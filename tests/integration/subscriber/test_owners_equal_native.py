"""With whose rights changes are applied, and where they are refused, compared with native (R8.21).

The role owns the native subscription, and ours connects as it. The table is owned by `alice`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import pytest

from cdc_replay.errors import CdcReplayError
from fixtures.native import wait_for
from fixtures.postgres import Database
from fixtures.twin import Twin

pytestmark = pytest.mark.spark

TABLE: Final = """
    create schema own authorization {alice};
    create table t (id int primary key, v text);
    create table own.fired (who text, id int);
    alter table t owner to {alice};
    alter table own.fired owner to {alice};
    grant insert on own.fired to public;
    grant usage on schema own, public to {alice}, {bob}, {role};
    create function own.note() returns trigger language plpgsql as $$ begin
        insert into own.fired values (current_user, new.id);
        return new;
    end $$;
    grant create on database {database} to {role};
    grant set on parameter session_replication_role to {role}
"""
TRIGGER: Final = """
    create trigger note before insert on {table} for each row execute function own.note();
    alter table {table} enable always trigger note
"""
DEFERRED: Final = """
    create constraint trigger note after insert on t deferrable initially deferred
        for each row execute function own.note();
    alter table t enable always trigger note
"""
GRANTS: Final = "grant select, insert, update, delete on t to {role}"


@dataclass(frozen=True)
class Case:
    """The setup, and why the change is refused; `fires_as` is the role that runs the trigger's function."""

    script: str
    attributes: str = ""
    run_as_owner: bool = False
    refused: str | None = None
    fires_as: str | None = None


CASES: Final = {
    "superuser": Case(TRIGGER.format(table="t"), "superuser", fires_as="alice"),
    "superuser and run_as_owner": Case(
        TRIGGER.format(table="t"), "superuser", run_as_owner=True, fires_as="role"
    ),
    "superuser, table of another superuser": Case(
        "alter role {alice} superuser;" + TRIGGER.format(table="t"), "superuser", fires_as="alice"
    ),
    "member": Case("grant {alice} to {role};" + TRIGGER.format(table="t"), fires_as="alice"),
    "member that does not inherit": Case(
        "grant {alice} to {role} with inherit false, set true;" + TRIGGER.format(table="t"),
        fires_as="alice",
    ),
    "member, nothing that runs": Case("grant {alice} to {role} with inherit false, set true"),
    "member that only inherits": Case(
        "grant {alice} to {role} with inherit true, set false", refused="cannot SET ROLE to"
    ),
    "grants": Case(GRANTS, refused="cannot SET ROLE to"),
    "grants and run_as_owner": Case(
        GRANTS + ";" + TRIGGER.format(table="t"), run_as_owner=True, fires_as="role"
    ),
    "grants, run_as_owner and policies": Case(
        GRANTS + "; alter table t enable row level security", run_as_owner=True, refused="row-level security"
    ),
    "nothing and run_as_owner": Case("select", run_as_owner=True, refused="permission denied for table t"),
    "superuser, owner without INSERT": Case(
        "revoke insert on t from {alice}", "superuser", refused="permission denied for table t"
    ),
    "superuser, owner without INSERT, run_as_owner": Case(
        "revoke insert on t from {alice}", "superuser", run_as_owner=True
    ),
    "policies": Case("grant {alice} to {role}; alter table t enable row level security"),
    "policies that are forced": Case(
        "alter table t enable row level security; alter table t force row level security",
        "superuser",
        refused="row-level security",
    ),
    "policies that are forced and run_as_owner": Case(
        "alter table t enable row level security; alter table t force row level security",
        "superuser",
        run_as_owner=True,
    ),
    "deferred trigger": Case(DEFERRED, "superuser", refused="cannot fire deferred trigger"),
    "deferred trigger and run_as_owner": Case(DEFERRED, "superuser", run_as_owner=True, fires_as="role"),
    "partition of another owner": Case(
        "drop table t; create table t (id int primary key, v text) partition by range (id);"
        "create table part partition of t default; alter table t owner to {alice};"
        # natively its privileges count, too
        "alter table part owner to {bob}; grant all on part to {alice};" + TRIGGER.format(table="part"),
        "superuser",
        fires_as="alice",
    ),
}


@dataclass(frozen=True)
class Roles:
    twin: Twin
    names: dict[str, str]

    def subscribe(self, case: Case) -> None:
        """As superuser; then both subscriptions are given to the role."""
        twin, role = self.twin, self.names["role"]
        twin.database().run(f"alter role {role} {case.attributes or 'nosuperuser'}")
        twin.subscribe("s", "p", tables="select", native=False, copy_data=False)
        pair = twin.pairs["s"]
        for database in (pair.ours, pair.native):
            names = {**self.names, "database": database.name}
            database.run(f"{TABLE.format(**names)}; {case.script.format(**names)}")
        dsn = pair.ours.cluster.dsn(pair.ours.name, role)
        twin.change("s", dsn=dsn, run_as_owner=case.run_as_owner)
        options = {"copy_data": False, "enabled": False, "run_as_owner": case.run_as_owner}
        twin.native("s").create(("p",), options)
        name = twin.native("s").name
        pair.native.run(
            f"alter subscription {name} set (password_required = false);"
            f" alter subscription {name} owner to {role}"
        )
        twin.native("s").resume()

    def leave(self, databases: list[Database]) -> None:
        for database in databases:
            for name in self.names.values():
                database.run(f"drop owned by {name} cascade")
        for name in self.names.values():
            databases[0].run(f"drop role {name}")


@pytest.fixture
def roles(twin: Twin) -> Iterator[Roles]:
    names = {name: f"{name}_of_{twin.publisher.name}" for name in ("alice", "bob", "role")}
    database = twin.database()
    database.require(16, "workers that act as the tables' owners (R8.21)")
    for name in names.values():
        database.run(f"create role {name} login")
    made = Roles(twin, names)
    yield made
    for pair in twin.pairs.values():
        subscription = twin.native("s").name
        pair.native.run(f"alter subscription {subscription} owner to postgres")
        made.leave([pair.ours, pair.native])


def fails_natively(native: Database, name: str) -> bool:
    [(errors,)] = native.rows(
        f"select apply_error_count from pg_stat_subscription_stats where subname = '{name}'"
    )
    return bool(errors)


def what_is_said(twin: Twin) -> str:
    try:
        return str([result.replay.error for result in twin.sync_ours("s")])
    except CdcReplayError as error:
        return str(error)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_owners_code_is_applied_and_refused_as_natively(twin: Twin, roles: Roles, case: Case) -> None:
    twin.publisher.run("create table t (id int primary key, v text); create publication p for table t")
    roles.subscribe(case)
    before = what_is_said(twin)  # some cases are refused when the table enters already
    native = twin.pairs["s"].native

    twin.publish("insert into t values (1, 'a')")

    if case.refused is not None:
        assert case.refused in what_is_said(twin)
        wait_for(lambda: fails_natively(native, twin.native("s").name), "a native error")
        assert twin.rows("s", "t") == []
        return
    assert before == "[None]"
    twin.sync("s")
    assert twin.rows("s", "t") == [(1, "a")]
    fired = [] if case.fires_as is None else [(roles.names[case.fires_as], 1)]
    assert twin.rows("s", "own.fired") == fired

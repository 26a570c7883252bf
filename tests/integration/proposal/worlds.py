"""A publisher with tables of several kinds, a subscription to it, and changes that touch each row once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from cdc_replay.commands.plan import plan
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.proposed_change import PlannedTable, PlanResult, SentChanges
from cdc_replay.model.results import ReplayResult
from cdc_replay.pgoutput.messages import Delete, Insert, RelationMessage, Update
from cdc_replay.pgoutput.reader import decode
from cdc_replay.proposal.run import PlanOptions
from fixtures.postgres import Database
from fixtures.twin import Twin

SUBSCRIBER = """
    create table orders (id int primary key, region text, total int, note text);
    create table items (id int primary key, v int, w text);
    create table trips (id int, day date, v int, primary key (id, day));
    create table trips_1 (id int, day date, v int, primary key (id, day));
    create table trips_2 (id int, day date, v int, primary key (id, day));
    create table late (id int primary key, v int)
"""

PUBLISHER = """
    create table orders (id int primary key, region text, total int, note text);
    alter table orders replica identity full;
    create table items (id int primary key, v int, w text);
    create table trips (id int, day date, v int, primary key (id, day)) partition by range (day);
    create table trips_1 partition of trips for values from ('2026-01-01') to ('2026-02-01');
    create table trips_2 partition of trips for values from ('2026-02-01') to ('2026-03-01');
    create table late (id int primary key, v int);
    insert into orders select i, (array['nsw', 'vic', 'qld'])[i % 3 + 1], i * 10, repeat('n', i)
        from generate_series(1, 60) as i;
    insert into items select i, i, 'w' from generate_series(1, 40) as i;
    insert into trips select i, date '2026-01-01' + i, i from generate_series(1, 45) as i;
    insert into late select i, i from generate_series(1, 10) as i;
    create publication a for table orders where (region = 'nsw');
    create publication b for table items where (id > 5);
    create publication c for table trips where (id > 4) with (publish_via_partition_root = true);
    create publication e
"""

CHANGES = """update orders set region = 'vic' where region = 'nsw' and id <= 20;
update orders set region = 'nsw' where region = 'qld' and id between 21 and 40;
update orders set note = 'changed' where id between 41 and 50;
delete from orders where id > 55;
insert into orders values (101, 'nsw', 5, ''), (102, 'vic', 5000, ''), (103, null, 500, '');
update items set v = v + 1 where id <= 10;
update items set id = id + 100 where id between 3 and 8;
delete from items where id in (39, 40);
update trips set v = 0 where id <= 8;
update trips set id = id + 100 where id in (2, 20);
delete from trips where id = 40;
update late set v = v + 1"""
"""Each row is changed by one statement at most, but for keys that move."""

RESET = """delete from orders; delete from items; delete from trips; delete from late;
insert into orders select * from first_orders; insert into items select * from first_items;
insert into trips select * from first_trips; insert into late select * from first_late"""

PUBLICATIONS = ("a", "b", "c", "e")


@dataclass(frozen=True)
class World:
    """The subscription `s`, synced, and what its replay of CHANGES did."""

    twin: Twin
    since: Lsn
    first_replay: ReplayResult
    first_decoded: Mapping[str, SentChanges]
    """What PostgreSQL decodes of CHANGES, by table."""

    def plan(self, script: str, *, since: Lsn | None = None, throwaway: bool = False) -> PlanResult:
        options = PlanOptions(str(since or self.since), throwaway)
        return plan(self.twin.config, "s", script, options)

    @property
    def ours(self) -> Database:
        return self.twin.pairs["s"].ours

    def reset(self) -> Lsn:
        """Take the publisher back to how it was, and replay that; the position after it."""
        self.twin.publisher.run(RESET)
        self.twin.sync_ours()
        position = self.twin.sync_ours()[0].to_lsn
        assert position is not None
        return position

    def change_again(self) -> ReplayResult:
        """Reset, then replay CHANGES again."""
        self.reset()
        decoded_changes(self.twin)
        return replay_changes(self.twin)


def make_world(twin: Twin) -> World:
    twin.publisher.run(PUBLISHER)
    for table in ("orders", "items", "trips", "late"):
        twin.publisher.run(f"create table first_{table} as table {table}")
    twin.subscribe("s", *PUBLICATIONS, tables=SUBSCRIBER, native=False, on_conflict="overwrite")
    twin.sync_ours()
    since = twin.sync_ours()[0].to_lsn
    assert since is not None
    slot = f"decoded_{twin.publisher.name}"
    twin.publisher.run(f"select pg_create_logical_replication_slot('{slot}', 'pgoutput')")
    replayed = replay_changes(twin)
    return World(twin, since, replayed, decoded_changes(twin))


def replay_changes(twin: Twin) -> ReplayResult:
    """Publish and replay CHANGES."""
    twin.publish(CHANGES)
    [synced] = twin.sync_ours()
    assert synced.replay.error is None, synced.replay.error
    return synced.replay


def by_name(result: PlanResult) -> dict[str, PlannedTable]:
    return {table.table.removeprefix("public."): table for table in result.tables}


def decoded_changes(twin: Twin) -> dict[str, SentChanges]:
    """What PostgreSQL sends of the changes since the last call to a native subscription, by table."""
    rows = twin.publisher.rows(
        "select data from pg_logical_slot_get_binary_changes("
        f"'decoded_{twin.publisher.name}', null, null, 'proto_version', '1',"
        f" 'publication_names', '{','.join(PUBLICATIONS)}')"
    )
    names: dict[int, str] = {}
    counts: dict[str, Counter[str]] = {}
    for (data,) in rows:
        message = decode(data)
        match message:
            case RelationMessage():
                names[message.relation] = str(message.name)
            case Insert() | Update() | Delete():
                count = counts.setdefault(names[message.relation], Counter())
                count.update({type(message).__name__.lower(): 1, "changes": 1, "bytes": len(data)})
            case _:
                pass
    return {table: SentChanges(**count) for table, count in counts.items()}

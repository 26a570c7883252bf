"""One publisher and its subscribers, with a mystery per row; for `test_mysteries`.

All are planted before the first question, in few pulls and windows, so that the module is cheap. `shop`
subscribes to everything and skips conflicts, `local` began without a copy and takes no changes with an
origin, `rated` has a row filter that divides.
"""

from __future__ import annotations

from dataclasses import dataclass

from cdc_replay.commands.capture import capture
from cdc_replay.commands.replay import replay
from cdc_replay.commands.resume import resume
from cdc_replay.commands.why import why
from cdc_replay.model.explained_row import WhyResult
from cdc_replay.model.lsn import Lsn
from cdc_replay.model.relation import QualifiedName
from fixtures.twin import Twin

SUBSCRIBER = """
    create table orders (id int primary key, region text, total numeric, note text);
    create table quiet (id int primary key, v int);
    create table wide (id int primary key, a int, b text);
    create table trips (id int, day date, v int, primary key (id, day));
    create table events (id int primary key, v bigint);
    create table wiped (id int primary key, v int);
    create table late (id int primary key, v int);
    create table ratio (id int primary key, n int, d int)
"""

PUBLISHER = """
    create table orders (id int primary key, region text, total numeric, note text);
    alter table orders replica identity full;
    create table quiet (id int primary key, v int);
    create table wide (id int primary key, a int, b text);
    create table trips (id int, day date, v int, primary key (id, day)) partition by range (day);
    create table trips_1 partition of trips for values from ('2026-01-01') to ('2026-02-01');
    create table trips_2 partition of trips for values from ('2026-02-01') to ('2026-03-01');
    create table events (id int primary key, v int);
    create table wiped (id int primary key, v int);
    create table late (id int primary key, v int);
    create table ratio (id int primary key, n int, d int);
    alter table ratio replica identity full;
    create table unlisted (id int primary key, v int);
    insert into orders select i, 'nsw', i, 'old' from generate_series(1, 20) as i;
    insert into orders values (50, 'vic', 50, 'outside');
    insert into quiet select i, 0 from generate_series(1, 5) as i;
    insert into wide select i, i, 'b' from generate_series(1, 5) as i;
    insert into events select i, i from generate_series(1, 5) as i;
    insert into wiped values (1, 1), (2, 2);
    insert into unlisted values (1, 1);
    create publication orders_nsw for table orders where (region = 'nsw');
    create publication orders_big for table orders where (total > 1000);
    create publication quiet_writes for table quiet with (publish = 'insert, update');
    create publication wide_a for table wide (id, a);
    create publication trips_root for table trips with (publish_via_partition_root = true);
    create publication plain for table events, wiped;
    create publication ratios for table ratio where (n / d > 1)
"""

SHOP = ("orders_nsw", "orders_big", "quiet_writes", "wide_a", "trips_root", "plain")

CHANGES = """update orders set note = 'new' where id in (1, 3, 4, 11);
update orders set region = 'qld' where id = 2;
delete from orders where id = 5;
insert into orders values (60, null, 1, ''), (61, 'qld', 2000, ''), (62, 'qld', 5000, '');
update orders set id = 107 where id = 7;
delete from quiet where id = 1;
insert into quiet values (10, 1);
update wide set b = 'not sent' where id <= 2;
insert into trips values (1, '2026-01-05', 1);
update trips set day = '2026-02-05' where id = 1;
truncate wiped"""

WITH_ORIGIN = """
    select pg_replication_origin_create('elsewhere_' || current_database());
    select pg_replication_origin_session_setup('elsewhere_' || current_database());
    insert into orders values (63, 'nsw', 1, 'from elsewhere');
    select pg_replication_origin_session_reset()
"""


@dataclass(frozen=True)
class Mysteries:
    """The planted rows, and the positions that the answers must name, by name."""

    twin: Twin
    positions: dict[str, Lsn]

    def why(self, subscription: str, table: str, *key: str, values: bool = False) -> WhyResult:
        name = QualifiedName("public", table)
        return why(self.twin.config, subscription, name, key, with_values=values)


def plant(twin: Twin) -> Mysteries:
    """Plant all of them."""
    twin.publisher.run(PUBLISHER)
    twin.subscribe("shop", *SHOP, tables=SUBSCRIBER, native=False, on_conflict="skip")
    twin.subscribe("local", "orders_nsw", tables=SUBSCRIBER, native=False, origin="none", copy_data=False)
    twin.subscribe("rated", "ratios", tables=SUBSCRIBER, native=False)
    twin.sync_ours()
    shop = twin.pairs["shop"].ours
    shop.run("insert into quiet values (10, 77)")  # will be in the way

    twin.publish(CHANGES)
    twin.publisher.run(WITH_ORIGIN)
    twin.publish("insert into ratio values (1, 4, 0);\ninsert into ratio values (2, 9, 3)")
    _replay(twin)
    shop.run(
        "update orders set note = 'by hand' where id = 3; delete from orders where id = 4;"
        " insert into orders values (999, 'nsw', 1, 'by hand'); insert into wiped values (1, 5)"
    )
    skipped = _parked_before(twin)
    resume(twin.config, "rated", skip=skipped)

    positions = {"skipped": skipped, "filter": twin.position()}
    twin.publish(
        "alter publication orders_nsw set table orders where (region in ('nsw', 'vic'));\n"
        "alter publication orders_big set table orders where (total > 9000);\n"
        "alter publication wide_a set table wide (id, a, b);\n"
        "alter publication plain add table late;\n"
        "alter table events alter v type bigint using v * 100;\n"
        "insert into late values (1, 1);\n"
        "insert into ratio values (3, 4, 0);\n"
        "insert into ratio values (4, 9, 3)"
    )
    _replay(twin)
    positions["parked"] = _parked_before(twin)

    twin.publish("update orders set note = 'captured' where id = 9")
    capture(twin.config, "pub")
    twin.publish("update orders set note = 'not yet' where id = 8")
    return Mysteries(twin, positions)


def _replay(twin: Twin) -> None:
    capture(twin.config, "pub")
    replay(twin.config, list(twin.pairs))


def _parked_before(twin: Twin) -> Lsn:
    ((text,),) = twin.pairs["rated"].ours.rows("select parked_transaction::text from cdc_replay.subscription")
    return Lsn.parse(text)

"""Wait for a native subscription that may stop with an error, and notice that at once."""

from __future__ import annotations

from fixtures.native import PRESENT_POSITION, REACHED, UNFINISHED_TABLES, NativeSubscription, wait_for

STOPPED = """
    select apply_error_count + sync_error_count > 0 from pg_stat_subscription_stats where subname = %s
      and subid in (select oid from pg_subscription
                     where subdbid = (select oid from pg_database where datname = current_database()))
"""


def caught_up(native: NativeSubscription) -> bool:
    """Wait until it has applied what is committed now; False if one of its workers failed.

    Raises:
        NativeStandsStill: if neither happens in time.
    """
    with native.publisher.connect() as publisher, native.subscriber.connect() as subscriber:

        def has_stopped() -> bool:
            rows = subscriber.execute(STOPPED, [native.name]).fetchall()
            return (True,) in rows

        def is_synchronised() -> bool:
            [(count,)] = subscriber.execute(UNFINISHED_TABLES, [native.name]).fetchall()
            return bool(count == 0)

        while True:
            wait_for(lambda: has_stopped() or is_synchronised(), f"the initial sync of {native.name}")
            [(position,)] = publisher.execute(PRESENT_POSITION).fetchall()

            def has_reached(position: str = position) -> bool:
                [(count,)] = publisher.execute(REACHED, [native.name, position]).fetchall()
                return bool(count)

            wait_for(lambda: has_stopped() or has_reached(), f"{native.name} to reach {position}")
            if has_stopped():
                return False
            if is_synchronised():
                return True

"""Nothing is adopted because of its name: objects of ours that somebody else owns are refused (R9.11, R2.3).

The stranger may create objects in the publisher's database. Whatever it made before us, or instead of us,
would run in the sessions of superusers, or decide what is captured.
"""

from __future__ import annotations

import pytest

from cdc_replay.capture.ddl.event_triggers import EVENT_TRIGGERS
from cdc_replay.commands.capture import capture
from cdc_replay.commands.refresh import refresh
from cdc_replay.commands.setup import setup
from cdc_replay.errors import PublisherNotReady
from cdc_replay.model.publication import PublishAction
from cdc_replay.publication.capture_set import CAPTURE_PUBLICATIONS
from fixtures.twin import Twin
from security.stranger import Stranger

pytestmark = pytest.mark.spark

TABLE = "create table t (id int primary key)"
INSERTS = CAPTURE_PUBLICATIONS[PublishAction.INSERT]

EMPTY_FUNCTION = (
    "create or replace function cdc_replay_capture.tell_definitions() returns event_trigger"
    " language plpgsql as 'begin end'"
)


@pytest.fixture
def owner(stranger: Stranger) -> Stranger:
    """A stranger that may create schemas and publications in the database."""
    stranger.database.run(f"grant create on database {stranger.database.name} to {stranger.name}")
    return stranger


def publish(twin: Twin) -> None:
    twin.publisher.run(f"{TABLE}; create publication p for table t")


BEFORE_SETUP = {
    "schema": ("create schema cdc_replay_capture", 'schema "cdc_replay_capture"'),
    "function": (
        f"create schema cdc_replay_capture; {EMPTY_FUNCTION}",
        "function cdc_replay_capture.tell_definitions()",
    ),
    "secret": (
        "create schema cdc_replay_capture; create table cdc_replay_capture.secret (value bytea)",
        "relation cdc_replay_capture.secret",
    ),
    "publication": (f"create publication {INSERTS}", f'publication "{INSERTS}"'),
}


@pytest.mark.parametrize(("script", "named"), BEFORE_SETUP.values(), ids=BEFORE_SETUP)
def test_setup_refuses_what_a_stranger_has_made_before_it(
    twin: Twin, owner: Stranger, script: str, named: str
) -> None:
    publish(twin)
    owner.run(script)

    with pytest.raises(PublisherNotReady) as refused:
        twin.subscribe("s", "p", tables=TABLE, native=False)

    assert f'{named} is owned by role "{owner.name}"' in str(refused.value)
    assert twin.publisher.rows("select from pg_event_trigger") == []
    assert twin.publisher.rows("select from pg_replication_slots where database = current_database()") == []
    assert not owner.is_superuser()


AFTER_SETUP = {
    "schema": "alter schema cdc_replay_capture owner to {}",
    "function": "alter function cdc_replay_capture.follow() owner to {}",
    "secret": "alter materialized view cdc_replay_capture.secret owner to {}",
    "publication": f"alter publication {INSERTS} owner to {{}}",
    "create": "grant create on schema cdc_replay_capture to {}",
    "emit": "grant execute on function cdc_replay_capture.emit to {}",
    "read": "grant select on cdc_replay_capture.secret to {}",
}


@pytest.mark.parametrize("script", AFTER_SETUP.values(), ids=AFTER_SETUP)
def test_every_run_refuses_what_has_come_into_other_hands(twin: Twin, owner: Stranger, script: str) -> None:
    """Not only `setup`: a grant or a new owner can come at any time."""
    publish(twin)
    twin.subscribe("s", "p", tables=TABLE, native=False)
    twin.sync_ours()
    twin.publisher.run(script.format(owner.name))

    for command in (
        lambda: setup(twin.config, "pub"),
        lambda: capture(twin.config, "pub"),
        lambda: refresh(twin.config, "s"),
        twin.sync_ours,
    ):
        with pytest.raises(PublisherNotReady, match=f'role "{owner.name}"'):
            command()


def test_a_function_that_was_replaced_is_made_again(twin: Twin) -> None:
    """Whatever a role with enough rights has changed: `setup` restores the object."""
    publish(twin)
    twin.subscribe("s", "p", tables=TABLE, native=False)
    twin.publisher.run(EMPTY_FUNCTION)

    assert setup(twin.config, "pub").statements != ()
    assert setup(twin.config, "pub").statements == ()
    assert len(EVENT_TRIGGERS) == len(twin.publisher.rows("select from pg_event_trigger"))

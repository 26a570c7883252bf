"""Errors of the server as ours: by what they are about, not by a word in them."""

from __future__ import annotations

import psycopg
import pytest

from cdc_replay.errors import SlotMissing
from cdc_replay.model.lsn import Lsn
from cdc_replay.postgres.connection import translated_errors
from cdc_replay.postgres.slot import advance_slot, copy_slot, drop_slot
from fixtures.postgres import Database

PENDING = """
    create table slots (id int);
    create function nothing() returns trigger language plpgsql as 'begin return null; end';
    create constraint trigger pending after insert on slots deferrable initially deferred
        for each row execute function nothing();
"""


def test_a_table_named_slots_that_is_in_use_is_no_active_slot(publisher: Database) -> None:
    publisher.run(PENDING)
    with publisher.connect() as session:
        session.autocommit = False
        session.execute("insert into slots values (1)")
        with (
            pytest.raises(psycopg.errors.ObjectInUse, match='"slots" because it has pending trigger events'),
            translated_errors("cannot do it"),
        ):
            session.execute("alter table slots add column b int")


def test_a_type_named_replication_slot_that_is_missing_is_no_missing_slot(publisher: Database) -> None:
    with (
        publisher.connect() as session,
        pytest.raises(psycopg.errors.UndefinedObject, match="replication slot"),
        translated_errors("cannot do it"),
    ):
        session.execute('select null::"replication slot"')


def test_a_missing_slot_is_one_for_every_function_that_needs_it(publisher: Database) -> None:
    with publisher.connect() as session:
        with pytest.raises(SlotMissing, match="advance"):
            advance_slot(session, "missing", Lsn(2**40))
        with pytest.raises(SlotMissing, match="copy"):
            copy_slot(session, "missing", "other")
        assert not drop_slot(session, "missing")

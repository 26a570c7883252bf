"""A server that does not answer, or says anything, keeps nobody from the others."""

from __future__ import annotations

import dataclasses
import socket
import threading
from datetime import timedelta
from pathlib import Path

import psycopg
import pytest
from fastapi import HTTPException

from cdc_replay.airflow.page import row_question
from cdc_replay.airflow.page.row_question import RowQuestion, answer
from cdc_replay.commands.prune import prune
from cdc_replay.config import Timeouts, load_config
from cdc_replay.errors import PruneLimitUnknown
from cdc_replay.monitoring.watch_commits import watch_commits
from fixtures.liar import Liar, message
from fixtures.twin import Twin

CONFIGURATION = """
publishers: {{shop: {{dsn: "{dsn}", change_log: ./change_log}}}}
subscriptions: {{nsw: {{publisher: shop, publications: [p], dsn: "{dsn}"}}}}
"""


def say_nothing(_session: socket.socket) -> None:
    threading.Event().wait()


def accept_settings(session: socket.socket) -> None:
    """Answer the first statements, which have no rows that matter."""
    result = message(b"T", b"\0\0") + message(b"C", b"SELECT 0\0")
    session.sendall(3 * result + message(b"Z", b"I"))
    threading.Event().wait()


def test_the_question_for_a_row_ends_although_a_server_never_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else nobody could ask for a row of another subscription until Airflow is restarted."""
    monkeypatch.setattr(row_question, "ANSWER_SECONDS", 1)
    with Liar(say_nothing) as liar:
        file = tmp_path / "cdc_replay.yaml"
        file.write_text(CONFIGURATION.format(dsn=liar.dsn), encoding="utf-8")
        monkeypatch.setenv("CDC_REPLAY_CONFIG", str(file))
        for _ in range(2):
            with pytest.raises(HTTPException, match="cannot connect"):
                answer("nsw", RowQuestion(table="public.t", key=["1"]))


def test_a_watch_ends_although_its_publisher_never_answers(tmp_path: Path) -> None:
    """A triggerer has few threads for all watches and sensors."""
    with Liar(accept_settings) as liar:
        file = tmp_path / "cdc_replay.yaml"
        file.write_text(CONFIGURATION.format(dsn=liar.dsn), encoding="utf-8")
        watch = watch_commits(load_config(file), "shop", least_seconds=0, greatest_seconds=1)
        watch.answer_seconds = 0.5
        with pytest.raises(psycopg.OperationalError, match="closed"):
            watch.look()


@pytest.mark.spark
def test_a_prune_ends_although_a_subscriber_never_answers(twin: Twin) -> None:
    """Whoever frees a disk that is full must know which one keeps the log."""
    twin.publisher.run("create table t (id int primary key); create publication p for table t")
    twin.subscribe("s", "p", tables="create table t (id int primary key)", native=False)
    twin.sync_ours()
    with Liar(accept_settings) as liar:
        twin.change("s", dsn=liar.dsn)
        config = dataclasses.replace(twin.config, timeouts=Timeouts(answer=timedelta(seconds=0.5)))
        with pytest.raises(PruneLimitUnknown, match='subscription "s" cannot be asked'):
            prune(config, "pub", keep_hours=0)

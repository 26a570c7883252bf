"""A hanging server delays one caller only, and its last answer stays available."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from cdc_replay.errors import ServerUnavailable
from cdc_replay.postgres.answers import Answer, Answers

SHORT = 0.05
LONG = 60


class Server:
    """Answers as it is set; hangs until it is released."""

    def __init__(self) -> None:
        self.says: str | Exception = "first"
        self.asked = 0
        self.hangs = False
        self.reached = threading.Event()
        self.let_go = threading.Event()

    def ask(self) -> str:
        self.asked += 1
        self.reached.set()
        if self.hangs:
            assert self.let_go.wait(LONG)
        if isinstance(self.says, Exception):
            raise self.says
        return self.says


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.let_go.set()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def answer(answers: Answers[str], server: Server) -> Answer[str]:
    return answers.ask({"server": server.ask})["server"]


def test_the_last_value_is_returned_with_its_age_while_the_server_is_down(
    server: Server, stack: ExitStack
) -> None:
    answers = stack.enter_context(Answers[str](LONG))
    assert answer(answers, server).value == "first"
    server.says = ServerUnavailable("gone")
    lost = answer(answers, server)
    assert (lost.value, str(lost.error)) == ("first", "gone")
    later = answer(answers, server)
    assert (later.seconds_old or 0) >= (lost.seconds_old or 0) > 0
    server.says = "second"
    back = answer(answers, server)
    assert (back.value, back.error) == ("second", None)


def test_a_server_that_never_answered_has_an_error_and_no_age(server: Server, stack: ExitStack) -> None:
    server.says = ServerUnavailable("gone")
    late = answer(stack.enter_context(Answers[str](LONG)), server)
    assert (late.value, late.seconds_old, str(late.error)) == (None, None, "gone")


def test_an_answer_that_cannot_be_read_is_an_error_of_its_server(server: Server, stack: ExitStack) -> None:
    server.says = RecursionError("too deep")
    answers, other = stack.enter_context(Answers[str](LONG)), Server()
    answered = answers.ask({"server": server.ask, "other": other.ask})
    assert "cannot be read: RecursionError: too deep" in str(answered["server"].error)
    assert answered["other"].value == "first"


def test_a_hanging_server_is_queried_once_and_keeps_its_last_value(server: Server, stack: ExitStack) -> None:
    answers = stack.enter_context(Answers[str](SHORT))
    other = Server()
    assert answer(answers, server).value == "first"
    server.hangs = True
    for _ in range(3):
        answers_by_server = answers.ask({"server": server.ask, "other": other.ask})
        assert (answers_by_server["server"].value, answers_by_server["other"].value) == ("first", "first")
        assert "no answer within" in str(answers_by_server["server"].error)
        assert answers_by_server["other"].error is None
    assert (server.asked, other.asked) == (2, 3)


def test_other_callers_get_the_last_value_while_one_waits(server: Server, stack: ExitStack) -> None:
    """The test would time out if the second caller waited too."""
    answers = stack.enter_context(Answers[str](LONG))
    assert answer(answers, server).value == "first"
    server.hangs, server.says = True, "second"
    server.reached.clear()
    received: list[Answer[str]] = []
    first = threading.Thread(target=lambda: received.append(answer(answers, server)))
    first.start()
    assert server.reached.wait(LONG)
    assert answer(answers, server).value == "first"
    assert first.is_alive()
    server.let_go.set()
    first.join()
    assert received[0].value == "second"


def test_a_late_answer_is_returned_to_a_later_caller(server: Server, stack: ExitStack) -> None:
    answers = stack.enter_context(Answers[str](SHORT, fresh_seconds=LONG))
    server.hangs = True
    assert answer(answers, server).value is None
    server.let_go.set()
    while (answer_now := answer(answers, server)).value is None:
        assert answer_now.error is not None
    assert (answer_now.value, answer_now.error, server.asked) == ("first", None, 1)


def test_a_fresh_answer_is_reused(server: Server, stack: ExitStack) -> None:
    answers = stack.enter_context(Answers[str](LONG, fresh_seconds=LONG))
    assert answer(answers, server) != answer(answers, server)  # by its age
    assert server.asked == 1

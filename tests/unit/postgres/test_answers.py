"""Answers of servers: one that hangs costs one caller a while, and what was known stays known."""

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
    """Says what it is told to; hangs until it is let go."""

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


def test_a_value_stays_known_with_its_age_while_the_server_is_down(server: Server, stack: ExitStack) -> None:
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
    found = answer(stack.enter_context(Answers[str](LONG)), server)
    assert (found.value, found.seconds_old, str(found.error)) == (None, None, "gone")


def test_a_hanging_server_is_asked_once_and_keeps_its_last_value(server: Server, stack: ExitStack) -> None:
    answers = stack.enter_context(Answers[str](SHORT))
    other = Server()
    assert answer(answers, server).value == "first"
    server.hangs = True
    for _ in range(3):
        told = answers.ask({"server": server.ask, "other": other.ask})
        assert (told["server"].value, told["other"].value) == ("first", "first")
        assert "no answer within" in str(told["server"].error)
        assert told["other"].error is None
    assert (server.asked, other.asked) == (2, 3)


def test_while_one_caller_waits_the_others_get_what_is_known(server: Server, stack: ExitStack) -> None:
    """The wait is so long that the test would not end if the second caller waited too."""
    answers = stack.enter_context(Answers[str](LONG))
    assert answer(answers, server).value == "first"
    server.hangs, server.says = True, "second"
    server.reached.clear()
    told: list[Answer[str]] = []
    first = threading.Thread(target=lambda: told.append(answer(answers, server)))
    first.start()
    assert server.reached.wait(LONG)
    assert answer(answers, server).value == "first"
    assert first.is_alive()
    server.let_go.set()
    first.join()
    assert told[0].value == "second"


def test_an_answer_that_comes_late_is_there_for_a_later_caller(server: Server, stack: ExitStack) -> None:
    answers = stack.enter_context(Answers[str](SHORT, fresh_seconds=LONG))
    server.hangs = True
    assert answer(answers, server).value is None
    server.let_go.set()
    while (found := answer(answers, server)).value is None:
        assert found.error is not None
    assert (found.value, found.error, server.asked) == ("first", None, 1)


def test_a_fresh_answer_is_not_asked_for_again(server: Server, stack: ExitStack) -> None:
    answers = stack.enter_context(Answers[str](LONG, fresh_seconds=LONG))
    assert answer(answers, server) != answer(answers, server)  # by its age
    assert server.asked == 1


def test_a_mistake_of_the_program_is_no_answer(server: Server, stack: ExitStack) -> None:
    server.says = ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        answer(stack.enter_context(Answers[str](LONG)), server)

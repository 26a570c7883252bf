"""A private Airflow on loopback with its own home, database, port and password, and a client of its API.

The parts are started one by one: `airflow standalone` would listen on all interfaces. Each is a session
leader and is stopped with all its children: first by SIGINT, on which the parts stop their tasks, then always
by SIGKILL, because now and then one of them does not end.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import httpx

from embedded.ports import free_port

USER: Final = "admin"

PARTS: Final[dict[str, tuple[str, ...]]] = {
    "api-server": ("api-server",),
    "scheduler": ("scheduler", "--skip-serve-logs"),
    "dag-processor": ("dag-processor",),
    "triggerer": ("triggerer", "--skip-serve-logs"),
}
"""Part → its arguments."""

WITHOUT_TRIGGERER: Final = ("api-server", "scheduler", "dag-processor")
"""The shipped DAGs defer no task; only sensors do."""

FINISHED: Final = frozenset({"success", "failed"})

# SQLite rejects one of two concurrent writers if it has read before. Its transaction has changed nothing.
_DATABASE_ERROR: Final = "Database error"
_SERVER_ERROR: Final = 500
_PAUSES_SECONDS: Final = (0.5, 1.0, 2.0)

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Settings:
    """How an instance is set up; `database` is a SQLAlchemy URL, by default a SQLite file in the home.

    `environment` is added to the environment of every part, and so of every task. `parts` of `PARTS` run.
    """

    dags: Path
    plugins: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    database: str | None = None
    parallelism: int = 4
    parts: tuple[str, ...] = WITHOUT_TRIGGERER


@dataclass(frozen=True, slots=True)
class Run:
    """A DAG run."""

    dag_id: str
    run_id: str
    state: str
    run_type: str


class Refused(Exception):
    """The API refused a request; the message is its reason."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"{status}: {reason}")
        self.status = status
        self.reason = reason


class Airflow:
    """One instance in `home`. Used as a context it is started and, whatever happens, stopped."""

    def __init__(self, home: Path, settings: Settings) -> None:
        self.home = home
        self.settings = settings
        self.port = free_port()
        self.password = secrets.token_urlsafe(12)
        self._parts: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """Where the UI and the API are."""
        return f"http://127.0.0.1:{self.port}"

    def environment(self) -> dict[str, str]:
        """The environment of the parts; `airflow` commands for this instance need it too."""
        database = self.settings.database or f"sqlite:///{self.home}/airflow.db"
        scripts = Path(sys.executable).parent
        return {
            **os.environ,
            "PATH": f"{scripts}{os.pathsep}{os.environ.get('PATH', '')}",
            "AIRFLOW_HOME": str(self.home),
            "AIRFLOW__CORE__DAGS_FOLDER": str(self.settings.dags),
            "AIRFLOW__CORE__PLUGINS_FOLDER": str(self.settings.plugins),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__PARALLELISM": str(self.settings.parallelism),
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": f"{USER}:admin",
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(self._passwords),
            "AIRFLOW__LOGGING__FILE_TASK_HANDLER_NEW_FILE_PERMISSIONS": "0o600",
            "AIRFLOW__LOGGING__FILE_TASK_HANDLER_NEW_FOLDER_PERMISSIONS": "0o700",
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": database,
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN_ASYNC": _async_url(database),
            "AIRFLOW__API__HOST": "127.0.0.1",
            "AIRFLOW__API__PORT": str(self.port),
            # Without it, tasks report to the default port and are killed.
            "AIRFLOW__API__BASE_URL": self.url,
            "AIRFLOW__API__WORKERS": "1",
            **self.settings.environment,
        }

    def start(self) -> None:
        """Migrate the database, start the parts and wait until they are healthy.

        Raises:
            RuntimeError: with the end of its log, if a part ends or does not become healthy.
        """
        self.home.mkdir(parents=True, exist_ok=True)
        self._passwords.touch(mode=0o600)
        self._passwords.write_text(json.dumps({USER: self.password}), encoding="utf-8")
        self._launch("db-migrate", ("db", "migrate"))
        migration = self._parts.pop("db-migrate")
        if migration.wait(timeout=120):
            raise RuntimeError(f"airflow db migrate failed: {self._log_tail('db-migrate')}")
        for part in self.settings.parts:
            self._launch(part, PARTS[part])
        self._wait_until_healthy(120)

    def stop(self, grace_seconds: float = 15) -> None:
        """Stop every part and its children."""
        for part in self._parts.values():
            _signal_group(part.pid, signal.SIGINT)
        deadline = time.monotonic() + grace_seconds
        for part in self._parts.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                part.wait(timeout=max(0.1, deadline - time.monotonic()))
        for part in self._parts.values():
            _signal_group(part.pid, signal.SIGKILL)
            part.wait()
        for pid in self._stragglers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._parts.clear()

    def kill_part(self, part: str) -> None:
        """Kill a part with its children, as a lack of memory does."""
        process = self._parts.pop(part)
        _signal_group(process.pid, signal.SIGKILL)
        process.wait()

    def start_part(self, part: str) -> None:
        """Start a part that was killed."""
        self._launch(part, PARTS[part])

    def client(self) -> Client:
        """A client that is logged in; a context, as it keeps connections open."""
        return Client(self.url, USER, self.password)

    @property
    def _passwords(self) -> Path:
        return self.home / "passwords.json"

    def _launch(self, part: str, arguments: Sequence[str]) -> None:
        with (self.home / f"{part}.log").open("ab") as log:
            self._parts[part] = subprocess.Popen(
                [sys.executable, "-m", "airflow", *arguments],
                cwd=self.home, env=self.environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def _wait_until_healthy(self, seconds: float) -> None:
        reported = {"scheduler": "scheduler", "dag-processor": "dag_processor", "triggerer": "triggerer"}
        wanted = ["metadatabase", *(name for part, name in reported.items() if part in self._parts)]

        def healthy() -> bool:
            for name, part in self._parts.items():
                if part.poll() is not None:
                    raise RuntimeError(f"airflow {name} ended: {self._log_tail(name)}")
            with contextlib.suppress(httpx.TransportError):
                answer = httpx.get(f"{self.url}/api/v2/monitor/health", timeout=10)
                parts = answer.json() if answer.status_code == httpx.codes.OK else {}
                return all((parts.get(name) or {}).get("status") == "healthy" for name in wanted)
            return False

        wait_for(healthy, f"Airflow in {self.home} to be healthy", seconds)

    def _log_tail(self, part: str) -> str:
        return (self.home / f"{part}.log").read_text(encoding="utf-8", errors="replace")[-3000:]

    def _stragglers(self) -> Iterator[int]:
        """Processes of this home that left their session, by their environment (Linux only)."""
        mark = f"AIRFLOW_HOME={self.home}".encode()
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if int(folder.name) != os.getpid() and mark in (folder / "environ").read_bytes().split(b"\0"):
                    yield int(folder.name)


class Client:
    """The calls of the REST API that the demo and the tests need."""

    def __init__(self, url: str, user: str, password: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=60)
        token = self.request("POST", "/auth/token", {"username": user, "password": password})["access_token"]
        self._http.headers["Authorization"] = f"Bearer {token}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Make one call; returns the JSON object of the answer.

        Raises:
            Refused: for every status of 400 and above.
        """
        answer = self._http.request(method, path, json=body)
        for pause in _PAUSES_SECONDS:
            if answer.status_code != _SERVER_ERROR or _DATABASE_ERROR not in answer.text:
                break
            time.sleep(pause)
            answer = self._http.request(method, path, json=body)
        if answer.is_error:
            reason = (
                answer.json().get("detail", answer.text) if "json" in answer.headers["content-type"] else ""
            )
            raise Refused(answer.status_code, str(reason or answer.text))
        content: dict[str, Any] = answer.json() if answer.content else {}
        return content

    @property
    def authorization(self) -> dict[str, str]:
        """The header that authenticates requests of pages outside the API."""
        return {"Authorization": self._http.headers["Authorization"]}

    def dag_ids(self) -> frozenset[str]:
        """The DAGs that the dag-processor has found."""
        return frozenset(dag["dag_id"] for dag in self.request("GET", "/api/v2/dags?limit=500")["dags"])

    def import_errors(self) -> tuple[str, ...]:
        """The DAG files that could not be parsed, with the reason."""
        errors = self.request("GET", "/api/v2/importErrors")["import_errors"]
        return tuple(f"{error['filename']}: {error['stack_trace']}" for error in errors)

    def unpause(self, *dag_ids: str) -> None:
        """Let the scheduler run these DAGs."""
        for dag_id in dag_ids:
            self.request("PATCH", f"/api/v2/dags/{dag_id}", {"is_paused": False})

    def pause(self, dag_id: str) -> None:
        """Let the scheduler start no run of this DAG."""
        self.request("PATCH", f"/api/v2/dags/{dag_id}", {"is_paused": True})

    def parse_again(self, dag_id: str) -> None:
        """Let the DAG processor parse this DAG's file; returns when it has."""
        path = f"/api/v2/dags/{dag_id}"
        before = self.request("GET", path)
        self.request("PUT", f"/api/v2/parseDagFile/{before['file_token']}")
        parsed = "last_parsed_time"
        wait_for(lambda: self.request("GET", path)[parsed] != before[parsed], f"{dag_id} to be parsed")

    def fail(self, run: Run) -> None:
        """Set a run to failed, as Airflow does after the last retry."""
        self.request("PATCH", f"/api/v2/dags/{run.dag_id}/dagRuns/{run.run_id}", {"state": "failed"})

    def trigger(self, dag_id: str, **params: object) -> Run:
        """Start a run with these Params.

        Raises:
            Refused: with status 400, if a Param is not valid.
        """
        body = {"logical_date": None, "conf": params}
        return _run(self.request("POST", f"/api/v2/dags/{dag_id}/dagRuns", body))

    def runs(self, dag_id: str) -> tuple[Run, ...]:
        """All runs, the oldest first."""
        path = f"/api/v2/dags/{dag_id}/dagRuns?order_by=run_after&limit=100"
        return tuple(_run(answer) for answer in self.request("GET", path)["dag_runs"])

    def run(self, dag_id: str, run_id: str) -> Run:
        """One run as it is now."""
        return _run(self.request("GET", f"/api/v2/dags/{dag_id}/dagRuns/{run_id}"))

    def wait_for_run(self, run: Run, seconds: float = 300) -> Run:
        """The run when it is finished; its state is `success` or `failed`.

        Raises:
            TimeoutError: if it is not finished in time.
        """

        def finished() -> Run | None:
            now = self.run(run.dag_id, run.run_id)
            return now if now.state in FINISHED else None

        return wait_for(finished, f"run {run.run_id} of {run.dag_id}", seconds)

    def task_states(self, run: Run) -> dict[str, str | None]:
        """Task id → state."""
        path = f"/api/v2/dags/{run.dag_id}/dagRuns/{run.run_id}/taskInstances"
        return {task["task_id"]: task["state"] for task in self.request("GET", path)["task_instances"]}

    def log(self, run: Run, task_id: str, try_number: int = 1) -> str:
        """The text of a task's log."""
        path = f"/api/v2/dags/{run.dag_id}/dagRuns/{run.run_id}/taskInstances/{task_id}/logs/{try_number}"
        lines = self.request("GET", f"{path}?full_content=true")["content"]
        return "\n".join(line if isinstance(line, str) else _log_line(line) for line in lines)

    def xcom(self, run: Run, task_id: str, key: str = "return_value") -> Any:  # noqa: ANN401 - JSON
        """What a task returned."""
        path = f"/api/v2/dags/{run.dag_id}/dagRuns/{run.run_id}/taskInstances/{task_id}/xcomEntries/{key}"
        return self.request("GET", f"{path}?deserialize=true")["value"]

    def links(self, run: Run, task_id: str) -> dict[str, str | None]:
        """The extra links of a task, by name."""
        path = f"/api/v2/dags/{run.dag_id}/dagRuns/{run.run_id}/taskInstances/{task_id}/links"
        links: dict[str, str | None] = self.request("GET", path)["extra_links"]
        return links

    def asset_events(self, uri: str) -> tuple[dict[str, Any], ...]:
        """The extras of an asset's events, the oldest first.

        Waits until the runs that they have triggered are started: Airflow fails to list their events before.
        """

        def answer() -> dict[str, Any] | None:
            try:
                return self.request("GET", "/api/v2/assets/events?order_by=timestamp&limit=500")
            except Refused as refused:
                if refused.status != _SERVER_ERROR:
                    raise
                return None

        events = wait_for(answer, "the events of assets", 120)["asset_events"]
        return tuple(event["extra"] for event in events if event["uri"] == uri)

    def make_asset_event(self, uri: str, extra: Mapping[str, Any]) -> None:
        """Create an event of an asset, as the UI does."""
        body = {"asset_id": self._asset_id(uri), "extra": dict(extra)}
        self.request("POST", "/api/v2/assets/events", body)

    def asset_state(self, uri: str, key: str) -> Any:  # noqa: ANN401 - JSON
        """A value of an asset's state."""
        return self.request("GET", f"/api/v2/assets/{self._asset_id(uri)}/state-store/{key}")["value"]

    def _asset_id(self, uri: str) -> int:
        assets = self.request("GET", "/api/v2/assets?limit=500")["assets"]
        (asset_id,) = (asset["id"] for asset in assets if asset["uri"] == uri)
        return int(asset_id)

    def has_queued_events(self, dag_id: str) -> bool:
        """Whether events of assets wait for the scheduler to create a run of this DAG."""
        path = f"/api/v2/dags/{dag_id}/assets/queuedEvents"
        return bool(self.request("GET", path)["queued_events"])

    def clear(self, run: Run) -> None:
        """Run the failed tasks of a run again."""
        path = f"/api/v2/dags/{run.dag_id}/clearTaskInstances"
        self.request("POST", path, {"dag_run_id": run.run_id, "dry_run": False, "only_failed": True})


def wait_for(condition: Callable[[], _T | None], subject: str, seconds: float = 300) -> _T:
    """The first truthy value of `condition`.

    Raises:
        TimeoutError: naming the subject.
    """
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:.0f} s for {subject}")
        time.sleep(0.3)
    return value


def _run(answer: Mapping[str, Any]) -> Run:
    return Run(answer["dag_id"], answer["dag_run_id"], answer["state"], answer["run_type"])


def _log_line(line: Mapping[str, Any]) -> str:
    errors = (f"{error['exc_type']}: {error['exc_value']}" for error in line.get("error_detail") or ())
    return "\n".join((str(line.get("event", "")), *errors))


def _async_url(database: str) -> str:
    return database.replace("sqlite://", "sqlite+aiosqlite://")


def _signal_group(leader: int, signal_number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal_number)

"""`docker-compose.yaml` and the image: valid, and about things that exist.

No container engine is needed: the file is checked against the Compose specification's schema, and every path,
command, module and environment name in it against the project and the installed packages.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from embedded.postgres import Cluster, binaries
from fixtures.airflow import ROOT, RunInAirflow
from fixtures.postgres import Database

COMPOSE: Final = ROOT / "docker-compose.yaml"
DOCKERFILE: Final = ROOT / "docker" / "Dockerfile"

OF_THE_IMAGES: Final = {
    "POSTGRES_USER", "POSTGRES_PASSWORD", "POSTGRES_DB",
    "SPARK_LOCAL_HOSTNAME", "SPARK_WORKER_MEMORY", "SPARK_WORKER_DIR", "PYSPARK_PYTHON",
    "PYSPARK_DRIVER_PYTHON", "JAVA_HOME",
}  # fmt: skip
"""Names that the PostgreSQL image, Spark and Java's programs read."""


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))
    return content


def services_of_the_project(compose: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: service for name, service in compose["services"].items() if "build" in service}


def dockerfile_instructions() -> Iterator[tuple[str, str]]:
    text = DOCKERFILE.read_text(encoding="utf-8").replace("\\\n", " ")
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            name, _, arguments = line.partition(" ")
            yield name, arguments.strip()


def environment_names(compose: dict[str, Any]) -> set[str]:
    names = {name for service in compose["services"].values() for name in service.get("environment", {})}
    for instruction, arguments in dockerfile_instructions():
        if instruction == "ENV":
            names.update(re.findall(r"(\w+)=", arguments))
    return names


def test_it_follows_the_compose_specification() -> None:
    tool = shutil.which("check-jsonschema", path=str(Path(sys.executable).parent))
    assert tool is not None
    process = subprocess.run(
        [tool, "--builtin-schema", "vendor.compose-spec", str(COMPOSE)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stdout + process.stderr


def test_all_parts_are_there(compose: dict[str, Any]) -> None:
    assert set(compose["services"]) == {
        "publisher", "subscriber", "airflow-db", "airflow-init", "airflow-api-server", "task-network",
        "airflow-scheduler", "airflow-dag-processor", "airflow-triggerer", "spark-connect", "spark-master",
        "spark-worker",
    }  # fmt: skip


def test_the_publisher_decodes_logically(compose: dict[str, Any]) -> None:
    assert "wal_level=logical" in compose["services"]["publisher"]["command"]


def test_every_service_that_stays_has_a_health_check(compose: dict[str, Any]) -> None:
    long_running = {
        name: service for name, service in compose["services"].items() if service["restart"] != "no"
    }
    assert set(compose["services"]) - set(long_running) == {"airflow-init"}
    assert all("healthcheck" in service for service in long_running.values())


def test_services_wait_for_services_that_exist_and_say_for_what(compose: dict[str, Any]) -> None:
    services = compose["services"]
    for service in services.values():
        for name, how in service.get("depends_on", {}).items():
            healthy = "healthcheck" in services[name]
            assert how["condition"] == ("service_healthy" if healthy else "service_completed_successfully")


def test_no_service_is_in_the_network_of_one_that_may_be_restarted(compose: dict[str, Any]) -> None:
    services = compose["services"]
    modes = {service["network_mode"] for service in services.values() if "network_mode" in service}
    for owner in (services[mode.removeprefix("service:")] for mode in modes):
        assert owner["command"] == ["sleep", "infinity"]
        # By this name executors call the driver, and the API server asks for logs.
        assert owner["networks"]["default"]["aliases"] == [owner["hostname"]] == ["airflow-scheduler"]


def test_ports_are_open_on_loopback_only(compose: dict[str, Any]) -> None:
    ports = [port for service in compose["services"].values() for port in service.get("ports", ())]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)


def test_secrets_come_from_the_environment_and_have_no_default() -> None:
    text = COMPOSE.read_text(encoding="utf-8")
    for name, rest in re.findall(r"\$\{(\w+)([^}]*)\}", text):
        assert rest == ":?" or name.endswith("_IMAGE"), name
        assert f"{name}=" in text.partition("\nname:")[0], f"{name} is not explained"
    for line in text.partition("\nname:")[2].splitlines():
        if re.search(r"password|secret|fernet", line, re.IGNORECASE) and "_FILE" not in line:
            assert "${" in line, line


def test_every_mounted_and_copied_path_exists(compose: dict[str, Any]) -> None:
    dockerfile = DOCKERFILE.read_text(encoding="utf-8")
    for service in compose["services"].values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert source in compose["volumes"] or (ROOT / source).exists(), source
    for service in services_of_the_project(compose).values():
        build = service["build"]
        assert ROOT / build["context"] / build["dockerfile"] == DOCKERFILE
        assert service["image"] == f"cdc-replay-{build['target']}"
        assert (
            f"${{BASE_IMAGE}} AS {build['target']}" in dockerfile
            or f"FROM spark AS {build['target']}" in dockerfile
        )
    for instruction, arguments in dockerfile_instructions():
        if instruction == "COPY":
            *sources, _ = (word for word in arguments.split() if not word.startswith("--"))
            assert sources
            assert all((ROOT / source).exists() for source in sources), sources


def test_every_path_inside_the_image_is_one_that_the_image_has() -> None:
    copied = {"/opt/airflow", "/opt/java", "/var/lib/cdc-replay"}
    for instruction, arguments in dockerfile_instructions():
        if instruction == "COPY":
            copied.add(f"/opt/cdc-replay/{arguments.split()[-1].removeprefix('./')}".rstrip("/"))
    text = DOCKERFILE.read_text(encoding="utf-8") + COMPOSE.read_text(encoding="utf-8")
    text += (ROOT / "docker" / "cdc_replay.yaml").read_text(encoding="utf-8")
    for path in re.findall(r"(?:/opt|/var/lib/cdc-replay)/?[\w./-]*", text):
        if path != "/opt/cdc-replay":
            assert any(f"{path}/".startswith(f"{known}/") for known in copied), path


def test_every_environment_name_is_read_by_someone(
    compose: dict[str, Any], run_in_airflow: RunInAirflow
) -> None:
    options = run_in_airflow(
        """
        from airflow.configuration import conf

        answer = [
            f"AIRFLOW__{section}__{option}".upper()
            for section, described in conf.configuration_description.items()
            for option in described["options"]
        ]
        """
    )
    sources = "".join(
        path.read_text(encoding="utf-8")
        for folder in ("src", "plugins", "docker")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".py", ".sh", ".yaml"}
    )
    for name in environment_names(compose):
        if name.startswith("AIRFLOW__"):
            assert name in options, name
        elif name.startswith("AIRFLOW_CONN_"):
            assert f"conn_id: {name.removeprefix('AIRFLOW_CONN_').lower()}" in sources, name
        else:
            assert name in OF_THE_IMAGES or name == "AIRFLOW_HOME" or name in sources, name


def test_every_airflow_command_exists(compose: dict[str, Any], run_in_airflow: RunInAirflow) -> None:
    """Parsed by Airflow's own command line, nothing is run."""
    commands = [service["command"] for service in compose["services"].values() if "command" in service]
    checks = [service["healthcheck"] for service in compose["services"].values() if "healthcheck" in service]
    commands += [check["test"][1:] for check in checks]
    airflow_commands = [command[1:] for command in commands if command[0] == "airflow"]
    assert len(airflow_commands) == 7
    answer = run_in_airflow(
        f"""
        from airflow.cli.cli_parser import get_parser
        from airflow.jobs.dag_processor_job_runner import DagProcessorJobRunner
        from airflow.jobs.scheduler_job_runner import SchedulerJobRunner
        from airflow.jobs.triggerer_job_runner import TriggererJobRunner

        for command in {airflow_commands!r}:
            get_parser().parse_args(command)
        runners = (DagProcessorJobRunner, SchedulerJobRunner, TriggererJobRunner)
        answer = [runner.job_type for runner in runners]
        """
    )
    assert {command[3] for command in airflow_commands if command[0] == "jobs"} == set(answer)


def test_every_spark_class_is_in_the_package(compose: dict[str, Any]) -> None:
    import pyspark

    jars = Path(pyspark.__file__).parent / "jars"
    (core,) = jars.glob("spark-core_*.jar")
    with zipfile.ZipFile(core) as content:
        names = set(content.namelist())
    classes = [
        service["command"][1]
        for service in compose["services"].values()
        if service.get("command", [""])[0] == "spark-class"
    ]
    assert len(classes) == 2
    assert all(f"{name.replace('.', '/')}.class" in names for name in classes)


def test_connections_and_configuration_are_readable(
    compose: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from cdc_replay.config import load_config

    environment = compose["services"]["airflow-scheduler"]["environment"]
    for name, value in environment.items():
        if name.startswith("AIRFLOW_CONN_"):
            json.loads(value)
            monkeypatch.setenv(name, value)
    config = load_config(ROOT / "docker" / "cdc_replay.yaml")
    hosts = {config.dsn_of(endpoint).rpartition("@")[2] for endpoint in config.publishers.values()}
    hosts |= {config.dsn_of(endpoint).rpartition("@")[2] for endpoint in config.subscriptions.values()}
    databases = {
        f"{name}/{service['environment']['POSTGRES_DB']}"
        for name, service in compose["services"].items()
        if "POSTGRES_DB" in service.get("environment", {})
    }
    assert hosts <= databases
    spark = {f"AIRFLOW_CONN_{group.spark_conn_id.upper()}" for group in config.groups.values()}
    assert spark <= set(environment)


def test_servers_get_roles_that_may_only_log_in(subscriber_cluster: Cluster, subscriber: Database) -> None:
    """The script runs as in PostgreSQL's image, on a database of that name."""
    role, password = f"apply_{subscriber.name}", "quote ' and \\"
    process = subprocess.run(
        ["/bin/sh", str(ROOT / "docker" / "roles.sh")],
        env={
            "PATH": f"{binaries()}:{os.environ['PATH']}",
            "PGHOST": "127.0.0.1",
            "PGPORT": str(subscriber_cluster.port),
            "POSTGRES_USER": "postgres",
            "POSTGRES_DB": subscriber.name,
            "ROLE_NAME": role,
            "ROLE_PASSWORD": password,
        },
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    try:
        assert process.returncode == 0, process.stderr
        attributes = "rolcanlogin, rolsuper, rolreplication, rolcreatedb, rolcreaterole, rolbypassrls"
        attributes_of_role = subscriber.rows(f"select {attributes} from pg_roles where rolname = '{role}'")
        assert attributes_of_role == [(True, False, False, False, False, False)]
        [(owner,)] = subscriber.rows(
            "select pg_get_userbyid(datdba)::text from pg_database where datname = current_database()"
        )
        assert owner == "owner"
    finally:
        subscriber.run(
            f"alter database {subscriber.name} owner to postgres; drop role if exists owner, {role}"
        )


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """A home with a `java` and a `spark-submit` that print how they were called."""
    for name in ("bin/java", "spark-submit"):
        program = tmp_path / name
        program.parent.mkdir(exist_ok=True)
        program.write_text('#!/bin/sh\nfor argument in "$@"; do echo "$argument"; done\n', encoding="utf-8")
        program.chmod(0o755)
    return tmp_path


def enter_spark_image(home: Path, *command: str, **environment: str) -> list[str]:
    path = f"{home}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    process = subprocess.run(
        ["/bin/sh", str(ROOT / "docker" / "spark-entrypoint.sh"), *command],
        env={"PATH": path, "JAVA_HOME": str(home), **environment},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return process.stdout.splitlines()


def test_spark_image_starts_an_executor_with_what_spark_passes(stand_in: Path) -> None:
    """The environment is that of Spark's own steps for a pod; each option is one that the class reads."""
    import pyspark

    jars = Path(pyspark.__file__).parent / "jars"
    called = enter_spark_image(
        stand_in, "executor", SPARK_DRIVER_URL="spark://driver@10.0.0.1:7078", SPARK_EXECUTOR_CORES="2",
        SPARK_EXECUTOR_MEMORY="1g", SPARK_APPLICATION_ID="app", SPARK_EXECUTOR_ID="7",
        SPARK_RESOURCE_PROFILE_ID="0", SPARK_EXECUTOR_POD_IP="10.0.0.2", SPARK_EXECUTOR_POD_NAME="pod",
        SPARK_JAVA_OPT_0="-Da=b c", SPARK_JAVA_OPT_1="-Dd",
    )  # fmt: skip
    assert called[:5] == ["-Da=b c", "-Dd", "-Xms1g", "-Xmx1g", "-cp"]
    assert called[5] == f"{jars}/*"
    name, options = called[6], dict(zip(called[7::2], called[8::2], strict=True))
    (jar,) = jars.glob("spark-kubernetes_*.jar")
    with zipfile.ZipFile(jar) as content:
        assert f"{name.replace('.', '/')}.class" in content.namelist()
        known = content.read(f"{name.replace('.', '/')}$.class")
    assert all(option.encode() in known for option in options)
    assert (options["--executor-id"], options["--hostname"], options["--podName"]) == ("7", "10.0.0.2", "pod")


def test_spark_image_starts_a_driver_in_its_pod(stand_in: Path) -> None:
    called = enter_spark_image(stand_in, "driver", "job.py", "a b", SPARK_DRIVER_BIND_ADDRESS="10.0.0.1")
    assert called[:2] == ["--deploy-mode", "client"]
    assert called[-2:] == ["job.py", "a b"]


def test_spark_image_runs_any_other_command(stand_in: Path) -> None:
    assert enter_spark_image(stand_in, "echo", "a b") == ["a b"]


def test_the_api_server_gets_its_password_from_the_environment(tmp_path: Path) -> None:
    """The script runs as in the image, with a command in Airflow's place that shows what it would see."""
    airflow = tmp_path / "airflow"
    airflow.write_text('#!/bin/sh\nprintf "%s|%s" "$*" "${AIRFLOW_ADMIN_PASSWORD-unset}"\n', encoding="utf-8")
    airflow.chmod(0o755)
    passwords = tmp_path / "passwords.json"
    process = subprocess.run(
        ["/bin/sh", str(ROOT / "docker" / "api-server.sh")],
        env={
            "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "AIRFLOW_ADMIN_PASSWORD": 'quote " and \\',
            "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(passwords),
        },
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert process.stdout == "api-server|unset"
    assert json.loads(passwords.read_text(encoding="utf-8")) == {"admin": 'quote " and \\'}
    assert passwords.stat().st_mode & 0o077 == 0

"""`deploy/kubernetes`: manifests about things that exist, without secrets and without privileges.

No cluster is needed. What the compose file's tests check of commands and Airflow's options is not checked
again: the manifests must use the same.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

import reference_pages
from cdc_replay.config import load_config
from fixtures.airflow import ROOT

FOLDER: Final = ROOT / "deploy" / "kubernetes"
GUIDE: Final = ROOT / "docs" / "how-to" / "kubernetes.md"
CONFIGURATION: Final = "/etc/cdc-replay"


def read(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text(encoding="utf-8")))


KUSTOMIZATION: Final = read("kustomization.yaml")[0]
RESOURCES: Final = [resource for name in KUSTOMIZATION["resources"] for resource in read(name)]
(EXECUTOR,) = read("executor.yaml")


def named(kind: str) -> set[str]:
    return {resource["metadata"]["name"] for resource in RESOURCES if resource["kind"] == kind}


def pod_specs() -> list[dict[str, Any]]:
    """The pods' specifications, that of Spark's executors last."""
    templates = [
        resource["spec"]["template"] for resource in RESOURCES if "template" in resource.get("spec", {})
    ]
    return [template["spec"] for template in templates] + [EXECUTOR["spec"]]


def containers() -> list[dict[str, Any]]:
    """All containers but that of the executors, of which Spark completes the most."""
    return [
        container
        for pod in pod_specs()[:-1]
        for container in pod.get("initContainers", []) + pod["containers"]
    ]


def environment() -> dict[str, Any]:
    return {entry["name"]: entry.get("value") for container in containers() for entry in container["env"]}


def compose_service(name: str) -> dict[str, Any]:
    content = yaml.safe_load((ROOT / "docker-compose.yaml").read_text(encoding="utf-8"))
    service: dict[str, Any] = content["services"][name]
    return service


def test_every_file_is_used() -> None:
    (generator,) = KUSTOMIZATION["configMapGenerator"]
    used = {"kustomization.yaml", *KUSTOMIZATION["resources"], *generator["files"]}
    assert {path.name for path in FOLDER.iterdir()} == used


def test_names_lead_to_resources() -> None:
    (generator,) = KUSTOMIZATION["configMapGenerator"]
    for pod in pod_specs():
        volumes = {volume["name"] for volume in pod["volumes"]}
        for volume in pod["volumes"]:
            assert volume.get("configMap", generator)["name"] == generator["name"]
            claim = volume.get("persistentVolumeClaim", {"claimName": "data"})
            assert claim["claimName"] in named("PersistentVolumeClaim")
        for container in pod.get("initContainers", []) + pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        assert pod.get("serviceAccountName", "airflow") in named("ServiceAccount")
    (binding,) = [resource for resource in RESOURCES if resource["kind"] == "RoleBinding"]
    assert binding["roleRef"]["name"] in named("Role")
    assert {subject["name"] for subject in binding["subjects"]} <= named("ServiceAccount")
    for resource in RESOURCES:
        if resource["kind"] in {"StatefulSet", "Deployment"}:
            labels = resource["spec"]["template"]["metadata"]["labels"]
            assert resource["spec"]["selector"]["matchLabels"] == labels
        if resource["kind"] == "Service":
            assert resource["metadata"]["name"] in named("StatefulSet")


def test_images_are_those_of_the_dockerfile_with_the_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    image = compose_service("airflow-scheduler")["image"]
    assert {container["image"] for container in containers()} == {image}
    (replaced,) = KUSTOMIZATION["images"]
    assert (replaced["name"], replaced["newTag"]) == (image, version)
    spark = (
        load_config(FOLDER / "cdc_replay.yaml").groups["shop"].spark_conf["spark.kubernetes.container.image"]
    )
    registry, _, name = spark.rpartition("/")
    assert name == f"{compose_service('spark-worker')['image']}:{version}"
    assert replaced["newName"] == f"{registry}/{image}"
    assert spark in GUIDE.read_text(encoding="utf-8")


def test_configuration_is_where_it_is_read() -> None:
    assert environment()["CDC_REPLAY_CONFIG"] == f"{CONFIGURATION}/cdc_replay.yaml"
    (group,) = load_config(FOLDER / "cdc_replay.yaml").groups.values()
    assert group.spark_conf["spark.kubernetes.executor.podTemplateFile"] == f"{CONFIGURATION}/executor.yaml"
    assert group.spark_conf["spark.kubernetes.namespace"] == KUSTOMIZATION["namespace"]
    for container in containers():
        assert {"name": "configuration", "mountPath": CONFIGURATION, "readOnly": True} in container[
            "volumeMounts"
        ]


def test_change_log_is_in_the_shared_volume() -> None:
    (mount,) = EXECUTOR["spec"]["containers"][0]["volumeMounts"]
    config = load_config(FOLDER / "cdc_replay.yaml")
    assert all(
        Path(publisher.change_log).is_relative_to(mount["mountPath"])
        for publisher in config.publishers.values()
    )


def test_environment_is_that_of_the_compose_file() -> None:
    """The clock of captures is its own: the compose file has events."""
    own = {"CDC_REPLAY_CONFIG", "CDC_REPLAY_CAPTURE_SCHEDULE"}
    known = compose_service("airflow-scheduler")["environment"].keys() | own
    assert environment().keys() <= known


def test_secrets_are_described_and_come_from_secrets() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in FOLDER.iterdir())
    guide = GUIDE.read_text(encoding="utf-8")
    secrets = set(re.findall(r"secretRef: \{name: (\w+)\}", text))
    assert all(f"create secret generic {name} " in guide for name in secrets)
    assert "Secret" not in {resource["kind"] for resource in RESOURCES}
    config = load_config(FOLDER / "cdc_replay.yaml")
    connections = {publisher.conn_id for publisher in config.publishers.values()}
    connections |= {subscription.conn_id for subscription in config.subscriptions.values()}
    connections |= {group.spark_conn_id for group in config.groups.values()}
    assert all(f"`AIRFLOW_CONN_{(name or '').upper()}`" in guide for name in connections)
    scheduler = compose_service("airflow-scheduler")["environment"]
    secret = {
        name for name, value in scheduler.items() if "${" in value and not name.startswith("AIRFLOW_CONN")
    }
    assert all(f"`{name}`" in guide for name in secret | {"AIRFLOW_ADMIN_PASSWORD"})
    assert not re.search(r"(?i)password: |secret_key|fernet", text)


def test_pods_have_no_privileges() -> None:
    for pod in pod_specs():
        context = pod["securityContext"]
        assert (context["runAsNonRoot"], context["runAsUser"]) == (True, 50000)
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod.get("initContainers", []) + pod["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert [pod.get("automountServiceAccountToken", True) for pod in pod_specs()] == [True, False, False]
    (role,) = [resource for resource in RESOURCES if resource["kind"] == "Role"]
    assert "secrets" not in json.dumps(role["rules"])
    assert "*" not in json.dumps(role["rules"])


def test_containers_have_resources_and_probes() -> None:
    for container in containers():
        assert container["resources"]["requests"].keys() == {"cpu", "memory"}
        assert "memory" in container["resources"]["limits"]
    for pod in pod_specs()[:-1]:
        for container in pod["containers"]:
            assert "livenessProbe" in container or "readinessProbe" in container


@pytest.mark.parametrize("service", ["api-server", "scheduler", "dag-processor", "triggerer"])
def test_processes_are_those_of_the_compose_file(service: str) -> None:
    (container,) = [container for container in containers() if container["name"] == service]
    same = compose_service(f"airflow-{service}")
    assert container["command"] == same["command"]
    if service != "api-server":
        assert container["livenessProbe"]["exec"]["command"] == same["healthcheck"]["test"][1:]


def test_status_probe_is_a_command() -> None:
    (container,) = [container for container in containers() if container["name"] == "status"]
    program, verb, *_ = container["readinessProbe"]["exec"]["command"]
    assert program == "cdc-replay"
    assert verb in reference_pages.commands()

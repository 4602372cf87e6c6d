"""The files in deploy/: what they say is what the services understand."""

import re
from pathlib import Path

import pytest
import yaml

from kvasir.common.config import ServiceConfig
from kvasir.decode_node.config import DecodeConfig
from kvasir.prefill_node.config import PrefillConfig
from kvasir.router.config import RouterConfig

DEPLOY = Path(__file__).parents[3] / "deploy"
CONFIGS: dict[str, type[ServiceConfig]] = {"router": RouterConfig, "prefill": PrefillConfig, "decode": DecodeConfig}
COMPOSE = yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())


@pytest.mark.parametrize("service", CONFIGS)
def test_each_service_understands_its_file_and_its_environment(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in COMPOSE["services"][service].get("environment", {}).items():
        monkeypatch.setenv(name, re.sub(r"\$\{\w+:-(.*)\}", r"\1", value))
    config = CONFIGS[service].load(["--config", str(DEPLOY / "config" / f"{service}.yaml")])
    assert str(config.model_dump()["model"]).startswith("/models/")


def test_nodes_announce_themselves_where_the_router_listens() -> None:
    router = RouterConfig.load(["--config", str(DEPLOY / "config/router.yaml")])
    for service in ("prefill", "decode"):
        node = yaml.safe_load((DEPLOY / "config" / f"{service}.yaml").read_text())
        assert node["join"] == [f"router:{router.grpc_listen.rpartition(':')[2]}"]
        assert node["cluster_secret_file"] == str(router.cluster_secret_file)


def test_every_build_target_exists_and_needs_one_base_image_only() -> None:
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    stages = set(re.findall(r"^FROM \S+ AS (\S+)", dockerfile, flags=re.MULTILINE))
    bases = set(re.findall(r"^FROM (\S+)", dockerfile, flags=re.MULTILINE)) - stages
    assert bases == {"scratch", "${PYTHON_IMAGE}"}
    assert {service["build"]["target"] for service in COMPOSE["services"].values()} <= stages


def test_services_wait_for_what_they_need() -> None:
    services = COMPOSE["services"]
    for name, service in services.items():
        for needed, how in service.get("depends_on", {}).items():
            one_shot = needed in ("model", "secret")
            expected = "service_completed_successfully" if one_shot else "service_healthy"
            assert how == {"condition": expected}, f"{name} on {needed}"
            assert needed in services

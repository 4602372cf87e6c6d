"""Clients that nobody here wrote, pointed at a cluster: they are content, and agree with each other."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.cluster import Cluster
from tests.service import REPO

pytestmark = [pytest.mark.interop, pytest.mark.timeout(600)]

HERE = Path(__file__).parent
# `make test-interop` installs them here, apart from what the suite itself needs.
PYTHON = Path(os.environ.get("INTEROP_PYTHON", REPO / "build/interop/bin/python"))
NODE_MODULES = Path(os.environ.get("INTEROP_NODE", REPO / "build/interop-node"))
KEY = "the-key"
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
CITY = {"city": "Paris"}


@pytest.fixture(scope="module")
def cluster(model_dir: Path) -> Iterator[Cluster]:
    with Cluster(model_dir, router_args=["--api-key", KEY]) as cluster:
        yield cluster


def run(*command: str | Path, cwd: Path = REPO, **environment: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", **environment},
        capture_output=True,
        text=True,
        timeout=480,
        cwd=cwd,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def found_by(cluster: Cluster, *command: str | Path) -> dict[str, object]:
    answer = run(
        *command, BASE_URL=f"{cluster.url}/v1", API_KEY=KEY, MODEL=model(cluster), OPENAI_NODE=str(NODE_MODULES)
    )
    found: dict[str, object] = json.loads(answer.splitlines()[-1])
    return found


def model(cluster: Cluster) -> str:
    return str(cluster.client(api_key=KEY).models.list().data[0].id)


@pytest.fixture(scope="module")
def expected(cluster: Cluster) -> str:
    """What the official Python client gets, which the other tests know well."""
    answer = cluster.client(api_key=KEY).chat.completions.create(
        model=model(cluster),
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        max_tokens=16,
    )
    return str(answer.choices[0].message.content)


def test_the_official_node_client(cluster: Cluster, expected: str) -> None:
    found = found_by(cluster, "node", HERE / "clients/openai_node.mjs")
    assert found["whole"] == found["streamed"] == found["helper"] == found["response"] == expected
    assert found["usage"] == found["streamedUsage"]
    assert set(found["structured"]) == {"city", "inhabitants"}  # type: ignore[call-overload]
    call = found["call"]
    assert call["name"] == "look_up"  # type: ignore[index]
    assert call["reason"] in ("stop", "tool_calls")  # type: ignore[index]
    assert found["events"] == ["response.created", "response.incomplete"]
    assert found["errors"] == [
        ["NotFoundError", 404, "model_not_found"],
        ["BadRequestError", 400, "invalid_value"],
        ["AuthenticationError", 401, "invalid_api_key"],
    ]


def test_litellm(cluster: Cluster, expected: str) -> None:
    found = found_by(cluster, PYTHON, HERE / "clients/litellm_client.py")
    assert found["whole"] == found["streamed"] == expected
    assert found["call"] == CITY
    assert found["errors"] == [["NotFoundError", 404], ["BadRequestError", 400], ["AuthenticationError", 401]]


def test_langchain(cluster: Cluster, expected: str) -> None:
    found = found_by(cluster, PYTHON, HERE / "clients/langchain_client.py")
    assert found["whole"] == found["streamed"] == found["responses"] == expected
    assert 0 < found["tokens"] <= 16  # type: ignore[operator]
    assert set(found["structured"]) == {"name", "is_capital"}  # type: ignore[call-overload]
    name, arguments = found["call"]  # type: ignore[misc]
    assert (name, arguments["city"]) in (("look_up", "Paris"), ("look_up", "Rome"))


def test_the_llm_command(cluster: Cluster, expected: str, tmp_path: Path) -> None:
    entry = {
        "model_id": "kvasir",
        "model_name": model(cluster),
        "api_base": f"{cluster.url}/v1",
        "api_key_name": "kvasir",
    }
    (tmp_path / "extra-openai-models.yaml").write_text(yaml.safe_dump([entry]))
    (tmp_path / "keys.json").write_text(json.dumps({"kvasir": KEY}))
    llm = [PYTHON.parent / "llm", "-m", "kvasir", "-o", "temperature", "0", "-o", "max_tokens", "16"]
    for options in ([], ["--no-stream"]):
        said = run(*llm, *options, "What is the capital of France?", LLM_USER_PATH=str(tmp_path))
        assert said.strip() == expected.strip()


def test_schemathesis_finds_no_fault_in_5000_cases(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.interop.scripted_router"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPO,
        env={**os.environ, "PYTHONPATH": f"{REPO / 'src'}{os.pathsep}{REPO}"},
    ) as router:
        assert router.stdout is not None
        url = router.stdout.readline().strip()
        said = run(
            *(PYTHON.parent / "schemathesis", "--no-color", "run", f"{url}/openapi.json"),
            *("--checks", CHECKS, "--max-examples", "300", "--seed", "1", "--phases", "coverage,fuzzing"),
            *("--request-timeout", "20", "--continue-on-failure"),
            *("--exclude-path", "/ready"),  # it may well say 503: it is asked for any number of nodes
            cwd=tmp_path,
        )
        router.communicate(timeout=20)
    cases = re.search(r"(\d+) generated", said)
    assert cases, said
    assert int(cases[1]) >= 5000

"""Activations of 8 bits leave no room for last bits that differ: the same tokens after a loss, and with drafts."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import Cluster
from tests.e2e import reference
from tests.e2e.reference import Prompt
from tests.e2e.test_faults import InBackground, stream
from tests.e2e.test_speculation import CONFIG, answers
from tests.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.full, pytest.mark.timeout(600)]

ARGS = ["--quantization", "w8a8_int8"]


@pytest.fixture(scope="module")
def integers(model_dir: Path) -> Iterator[Cluster]:
    with Cluster(model_dir, num_decode=2, prefill_args=ARGS, decode_args=ARGS) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def prompt(model_dir: Path) -> Prompt:
    return next(prompt for prompt in reference.prompts(model_dir) if prompt.name == "513-tokens")


def test_drafts_do_not_change_tokens(integers: Cluster, model_dir: Path) -> None:
    expected = answers(integers)
    with Cluster(model_dir, prefill_args=ARGS, decode_args=[*ARGS, "--speculative-config", CONFIG]) as speculating:
        with speculating.deltas(speculating.decode, "vllm:spec_decode_num_accepted_tokens_total") as rose:
            assert answers(speculating) == expected
        assert rose["vllm:spec_decode_num_accepted_tokens_total"] > 10


def test_a_killed_decode_node_changes_no_token(integers: Cluster, prompt: Prompt) -> None:
    """What was said before is a prompt to the other node: computed in chunks, where it was computed token by token."""
    whole = stream(integers, prompt, cache_salt="whole")
    answer = InBackground(integers, prompt, cache_salt="struck")
    wait_until(lambda: answer.count >= 20, 60, "some tokens")
    next(node for node in integers.living("decode") if node.metrics()["vllm:num_requests_running"] > 0).kill()
    assert answer.result() == whole

"""The official Python client, against a real cluster."""

import openai
import pytest

from tests.cluster import Cluster

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def test_chat(cluster: Cluster) -> None:
    answer = cluster.client().chat.completions.create(
        model=cluster.model, messages=QUESTION, temperature=0, max_tokens=32
    )
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_streamed_chat_is_the_same(cluster: Cluster) -> None:
    stream = cluster.client().chat.completions.create(
        model=cluster.model,
        messages=QUESTION,
        temperature=0,
        max_tokens=32,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "The capital of France is Paris."
    reasons = [c.choices[0].finish_reason for c in chunks if c.choices]
    assert [reason for reason in reasons if reason is not None] == ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8


def test_completion_streamed_and_not(cluster: Cluster) -> None:
    arguments = {"model": cluster.model, "prompt": "The quick brown fox", "temperature": 0, "max_tokens": 24}
    whole = cluster.client().completions.create(**arguments)
    streamed = list(cluster.client().completions.create(**arguments, stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed) == whole.choices[0].text
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 24


def test_first_token_obeys_the_sampling_rules(cluster: Cluster) -> None:
    """The first token is sampled on the prefill node, the others on the decode node: a ban must hold on both."""
    arguments = {"model": cluster.model, "prompt": "Paris Paris Paris Paris is", "temperature": 0, "max_tokens": 8}
    plain = cluster.client().completions.create(**arguments, extra_body={"return_token_ids": True})
    ids = plain.choices[0].token_ids  # type: ignore[attr-defined]
    banned = {str(token): -100 for token in set(ids)}
    other = cluster.client().completions.create(**arguments, logit_bias=banned, extra_body={"return_token_ids": True})
    assert not set(other.choices[0].token_ids) & set(ids)  # type: ignore[attr-defined]
    # Presence counts output only, so it leaves the first token alone; repetition counts the prompt too.
    presence = cluster.client().completions.create(
        **arguments, presence_penalty=2, extra_body={"return_token_ids": True}
    )
    assert presence.choices[0].token_ids[0] == ids[0]  # type: ignore[attr-defined]


def test_one_token_needs_no_decode_node(cluster: Cluster) -> None:
    answer = cluster.client().completions.create(model=cluster.model, prompt="Hello", max_tokens=1, temperature=0)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 1


def test_end_of_sequence_as_the_very_first_token(cluster: Cluster) -> None:
    answer = cluster.client().completions.create(
        model=cluster.model, prompt="Hello", max_tokens=8, temperature=0, logit_bias={"2": 100}
    )
    assert answer.choices[0].text == ""
    assert answer.choices[0].finish_reason == "stop"


def test_its_own_error_types(cluster: Cluster) -> None:
    client = cluster.client()
    with pytest.raises(openai.NotFoundError) as not_found:
        client.chat.completions.create(model="no-such-model", messages=QUESTION)
    assert not_found.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=cluster.model, messages=QUESTION, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(model=cluster.model, prompt=[5] * 9000, max_tokens=8)
    assert too_long.value.code == "context_length_exceeded"

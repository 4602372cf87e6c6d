"""Structured output of the real model, through router, prefill node and decode node."""

import asyncio
import json
import re
from typing import Any

import httpx
import pytest

from tests.cluster import Cluster
from tests.e2e.asker import CHAT, Asker, ask
from tests.schemas import Schema, check_answer, schemas

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

ASKED = [{"role": "user", "content": "Describe a person as JSON."}]
MAX_TOKENS = 200


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}


def answer_to(asker: Asker, structure: dict[str, Any], **body: Any) -> Any:
    return asker.whole(CHAT, messages=ASKED, **{"max_tokens": MAX_TOKENS, "seed": 7, **structure, **body})


def test_answers_are_what_the_schemas_allow(cluster: Cluster) -> None:
    """From each eighth of the schemas one, all at once; what is cut short says so."""
    some = schemas()[5::25]

    async def run(asker: Asker) -> list[Any]:
        return await asyncio.gather(*(answer_to(asker, {"response_format": schema_format(one)}) for one in some))

    num_whole = 0
    for schema, answer in zip(some, ask(cluster, run), strict=True):
        num_whole += is_whole(schema, answer["choices"][0], answer["usage"]["completion_tokens"])
    assert num_whole > len(some) // 2, "an answer that was cut short proves little"


def is_whole(schema: Schema, choice: Any, num_tokens: int) -> bool:
    if choice["finish_reason"] == "length":
        assert num_tokens == MAX_TOKENS
        return False
    assert choice["finish_reason"] == "stop"
    check_answer(schema, choice["message"]["content"])
    return True


def test_every_way_of_asking(cluster: Cluster) -> None:
    date = r"\d{4}-\d\d-\d\d"

    async def run(asker: Asker) -> None:
        async def text(outputs: dict[str, Any], **body: Any) -> str:
            choice = (await answer_to(asker, outputs, **body))["choices"][0]
            assert choice["finish_reason"] == "stop"
            content: str = choice["message"]["content"]
            return content

        assert re.fullmatch(date, await text({"structured_outputs": {"regex": date}}))
        assert await text({"structured_outputs": {"choice": ["tall", "日本", "\n"]}}) in ("tall", "日本", "\n")
        assert re.fullmatch("[ab]c", await text({"structured_outputs": {"grammar": 'start: ("a"|"b") "c"'}}))
        assert re.fullmatch("[ab]c", await text({"structured_outputs": {"grammar": 'root ::= ("a"|"b") "c"'}}))
        # Not even a bias, a list of tokens or a banned word leads out of it.
        bias = {"logit_bias": {"198": 100}, "allowed_token_ids": [198], "bad_words": ["tall"], "min_tokens": 20}
        assert await text({"structured_outputs": {"choice": ["tall"]}, **bias}, ignore_eos=True) == "tall"
        # A stop string does, for it is the client's own; what ends early is said to have stopped.
        assert await text({"structured_outputs": {"choice": ["tall"]}}, stop=["ll"]) == "ta"
        schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}}, "required": ["name"]}
        whole = await text({"structured_outputs": {"json": {**schema, "additionalProperties": False}}})
        assert json.loads(whole).keys() == {"name"}

    ask(cluster, run)


def test_a_stream_is_the_whole_and_every_cut_is_its_beginning(cluster: Cluster) -> None:
    asked = {"response_format": schema_format({"type": "array", "items": {"enum": ["red", "日本"]}, "minItems": 3})}

    async def run(asker: Asker) -> None:
        whole = (await answer_to(asker, asked, max_tokens=100))["choices"][0]["message"]["content"]
        for max_tokens in (1, 2, 3, 5, 8, 100):
            body = {**asked, "messages": ASKED, "seed": 7, "max_tokens": max_tokens}
            events = await asker.chunks(CHAT, **body)
            choices = [event["choices"][0] for event in events]
            streamed = "".join(choice["delta"].get("content") or "" for choice in choices)
            reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
            assert whole.startswith(streamed)
            assert reasons == ["stop" if streamed == whole else "length"]

    ask(cluster, run)


def test_an_answer_of_one_token_never_sees_a_decode_node(cluster: Cluster) -> None:
    tokens = "vllm:generation_tokens_total"

    async def run(asker: Asker) -> None:
        answer = await answer_to(asker, {"structured_outputs": {"choice": ["A", "B"]}}, return_token_ids=True)
        assert len(answer["choices"][0]["token_ids"]) == 1
        assert answer["choices"][0]["finish_reason"] == "stop"

    with cluster.deltas(cluster.decode, tokens) as rose:
        ask(cluster, run)
    assert rose[tokens] == 0


def test_a_bad_schema_disturbs_no_stream(cluster: Cluster) -> None:
    bad = [{"type": "string", "pattern": "^(["}, {"$ref": "#/$defs/x"}, {"type": 7}, {"properties": {"foo": "bar"}}]
    free = {"prompt": "Once upon a time", "max_tokens": 60, "temperature": 0, "ignore_eos": True}

    async def run() -> None:
        async with httpx.AsyncClient(base_url=cluster.url, timeout=120) as client:
            asker = Asker(client, cluster.model)
            alone = await asker.ids(**{key: value for key, value in free.items() if key != "temperature"})
            streaming = asyncio.create_task(asker.chunks(**free, return_token_ids=True))
            for schema in bad:
                body = {"model": cluster.model, "messages": ASKED, "response_format": schema_format(schema)}
                assert (await client.post(CHAT, json=body)).status_code == 400
            chunks = await streaming
            ids = [token_id for chunk in chunks for token_id in chunk["choices"][0].get("token_ids") or []]
            assert ids == alone

    asyncio.run(run())

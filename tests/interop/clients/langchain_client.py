"""langchain-openai. Prints what it found as JSON."""

import json
import os
from typing import Literal

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

QUESTION = "What is the capital of France?"


class City(BaseModel):
    name: Literal["Paris", "Rome"]
    is_capital: bool


@tool
def look_up(city: Literal["Paris", "Rome"]) -> str:
    """Look a city up."""
    return city


def chat(max_tokens: int, **options: object) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=os.environ["BASE_URL"],
        api_key=os.environ["API_KEY"],
        model=os.environ["MODEL"],
        temperature=0,
        max_tokens=max_tokens,
        max_retries=0,
        **options,
    )


found: dict[str, object] = {}
whole = chat(16).invoke(QUESTION)
found["whole"] = whole.content
found["tokens"] = whole.usage_metadata["output_tokens"]
found["streamed"] = "".join(chunk.content for chunk in chat(16).stream(QUESTION))
found["structured"] = chat(60).with_structured_output(City, method="json_schema").invoke(QUESTION).model_dump()
called = chat(80).bind_tools([look_up], tool_choice="look_up").invoke(QUESTION)
found["call"] = [called.tool_calls[0]["name"], called.tool_calls[0]["args"]]
found["responses"] = chat(16, use_responses_api=True).invoke(QUESTION).text
print(json.dumps(found))

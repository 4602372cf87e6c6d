"""litellm, as a proxy uses it. Prints what it found as JSON."""

import json
import os

import litellm

BASE = {"api_base": os.environ["BASE_URL"], "api_key": os.environ["API_KEY"], "num_retries": 0, "max_retries": 0}
MODEL = "openai/" + os.environ["MODEL"]
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 16, **BASE}
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Paris"]}}, "required": ["city"]},
    },
}

found: dict[str, object] = {}
found["whole"] = litellm.completion(**GREEDY).choices[0].message.content
found["streamed"] = "".join(
    chunk.choices[0].delta.content or "" for chunk in litellm.completion(**GREEDY, stream=True) if chunk.choices
)
called = litellm.completion(**GREEDY | {"max_tokens": 60}, tools=[TOOL], tool_choice="required")
found["call"] = json.loads(called.choices[0].message.tool_calls[0].function.arguments)
errors = []
for change in ({"model": "openai/nobody"}, {"temperature": -1}, {"api_key": "wrong"}):
    try:
        litellm.completion(**GREEDY | change)
    except Exception as error:
        errors.append([type(error).__name__, getattr(error, "status_code", None)])
found["errors"] = errors
print(json.dumps(found))

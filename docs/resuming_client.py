"""A streamed completion that survives the network: after a cut it comes back, and goes on behind the last event.

python docs/resuming_client.py http://127.0.0.1:8000 smollm2-135m-instruct 'Tell me a story.'
"""

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx

GRACE_S = 30.0  # for so long the cluster goes on without us
PAUSE_S = 0.2


def chunks(url: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> Iterator[dict[str, Any]]:
    """Each chunk once, however often the connection breaks. Raises if the answer fails, or is not kept any more."""
    body = {**body, "stream": True, "stream_options": {"resume_grace_s": GRACE_S}}
    event_id = last_id = ""
    while True:
        resuming = {"Last-Event-ID": last_id} if last_id else {}
        try:
            with httpx.stream(
                "POST", url, json=None if last_id else body, headers={**(headers or {}), **resuming}, timeout=60
            ) as response:
                if response.status_code != 200:
                    raise RuntimeError(response.read().decode())
                for line in response.iter_lines():
                    if line.startswith("id: "):
                        event_id = line.removeprefix("id: ")
                    elif line.startswith("data: "):
                        last_id = event_id
                        if line == "data: [DONE]":
                            return
                        chunk = json.loads(line.removeprefix("data: "))
                        if "error" in chunk:
                            raise RuntimeError(chunk["error"]["message"])
                        yield chunk
        except httpx.TransportError:
            if not last_id:
                raise  # nothing has come yet: whoever asks again asks anew
        time.sleep(PAUSE_S)


def main() -> None:
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    base_url, model, content = sys.argv[1:]
    body = {"model": model, "messages": [{"role": "user", "content": content}]}
    for chunk in chunks(f"{base_url}/v1/chat/completions", body):
        print(chunk["choices"][0]["delta"].get("content", ""), end="", flush=True)
    print()


if __name__ == "__main__":
    main()

"""What `kvasir serve` shows: the lines of all processes under their names, its own, and the way in."""

import contextlib
import json
from typing import TextIO

from kvasir.cli.child import ChildSpec
from kvasir.cli.serve_config import ServeConfig
from kvasir.common.addresses import join_address

_COLOURS = {"serve": "1", "router": "36", "prefill": "33", "decode": "32", "redis": "35"}


class Output:
    """Names in colour on a terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._coloured = stream.isatty()

    def say(self, message: str) -> None:
        for line in message.splitlines():
            self.show("serve", line)

    def show(self, name: str, line: str) -> None:
        label = f"{name:>10} |"
        if self._coloured:
            label = f"\x1b[{_COLOURS.get(name.partition('-')[0], '0')}m{label}\x1b[0m"
        with contextlib.suppress(OSError):  # nobody reads any more: no reason to stop serving
            print(label, line, file=self._stream, flush=True)


def banner(config: ServeConfig, router: ChildSpec, model_name: str) -> str:
    """Where it is, and a line to paste that streams an answer."""
    assert router.health is not None, "the router speaks HTTP"
    url = f"http://{join_address(*router.health)}"
    model = config.served_model_name[0] if config.served_model_name else model_name
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"model": model, "stream": True, "temperature": 0, "messages": messages}
    key = " -H 'Authorization: Bearer YOUR-KEY'" if config.api_key else ""
    return (
        f"\nKvasir serves {model} at {url}/v1  "
        f"({config.prefill} prefill, {config.decode} decode, connector {config.connector})\n\n"
        f"  curl -N {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{json.dumps(body)}'\n\n"
        f"  kvasir chat --url {url}        kvasir bench serve --base-url {url}\n\n"
        "Ctrl-C stops it.\n"
    )

"""`kvasir chat`: a conversation in the terminal, over the OpenAI API."""

import argparse
import asyncio
import os
import sys
from collections.abc import Iterable

import aiohttp

from kvasir.bench.openai_client import first_model
from kvasir.bench.timeline import Timeline
from kvasir.cli.conversation import ChatFailed, Conversation, dim

HELP = "/exit ends (so does Ctrl-D), /new begins a new conversation, Ctrl-C stops an answer"


def describe(timeline: Timeline) -> str:
    """TTFT 45 ms, 37.2 tokens/s (120 tokens)"""
    count = timeline.num_output_tokens
    speed = f", {1 / timeline.tpot_s:.1f} tokens/s" if timeline.tpot_s else ""
    return f"TTFT {timeline.ttft_s * 1e3:.0f} ms{speed} ({count} token{'s' if count != 1 else ''})"


def talk(conversation: Conversation, lines: Iterable[str]) -> int:
    """Until there are no more lines, or /exit. 1 if the last answer has failed: for who sends lines by a pipe."""
    conversation.begin()
    status = 0
    for line in lines:
        text = line.strip()
        if text in ("/exit", "/quit"):
            break
        if text == "/new":
            conversation.begin()
        elif text.startswith("/"):
            print(HELP)
        elif text:
            status = _answer(conversation, text)
    return status


def _answer(conversation: Conversation, text: str) -> int:
    try:
        timeline = asyncio.run(conversation.answer(text))
    except KeyboardInterrupt:
        print(dim("\n[stopped]"))
        return 0
    except (ChatFailed, aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        print(f"\nerror: {error or type(error).__name__}", file=sys.stderr)
        return 1
    cut = ", cut at --max-tokens" if conversation.is_cut else ""
    print(dim(f"\n[{describe(timeline)}{cut}]" if timeline else "[an empty answer]"))
    return 0


def _typed_lines() -> Iterable[str]:
    import readline  # noqa: F401 - imported for what it does to input(): editing and history

    while True:
        try:
            yield input("\n> ")
        except (EOFError, KeyboardInterrupt):
            print()
            return


def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    url = options.url if "://" in options.url else f"http://{options.url}"
    url = url.rstrip("/").removesuffix("/v1")
    try:
        model = options.model or asyncio.run(_first_model(url, headers))
    except ValueError as error:
        print(f"kvasir chat: {error}\n{_advice(error.__cause__)}", file=sys.stderr)
        return 1
    conversation = Conversation(
        url=url,
        model=model,
        system=options.system,
        headers=headers,
        options={"temperature": options.temperature, "max_completion_tokens": options.max_tokens},
    )
    if not sys.stdin.isatty():
        return talk(conversation, sys.stdin)
    print(f"{model} at {url}. {HELP}.")
    return talk(conversation, _typed_lines())


def _advice(error: BaseException | None) -> str:
    if isinstance(error, aiohttp.ClientResponseError) and error.status == 401:
        return "It wants a key: --api-key, or OPENAI_API_KEY in the environment."
    return "Is a server running there? `kvasir serve` starts one."


async def _first_model(url: str, headers: dict[str, str]) -> str:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=10)) as session:
        return await first_model(session, url, headers)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvasir chat", description="Talk with a model in the terminal.")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)")
    parser.add_argument("--model", help="its name for the API (default: the first that the server lists)")
    parser.add_argument("--system", help="what the model is told before the conversation")
    parser.add_argument("--temperature", type=float, default=0.7, help="default: %(default)s")
    parser.add_argument("--max-tokens", type=int, default=1024, help="longest answer (default: %(default)s)")
    parser.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY"), help="default: OPENAI_API_KEY")
    return parser

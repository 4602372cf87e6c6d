"""Says in time whether a grammar can be compiled, without letting the compiling hurt anybody.

Grammars come from strangers, and no compiler is proof against them. So it runs in worker processes that may hang or
die: one that does is ended and replaced, and what it was given is refused.
"""

import asyncio
import json
import logging
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvasir.common.errors import InvalidRequest, Overloaded
from kvasir.common.grammar import Grammar
from kvasir.common.own_time import own_timeout
from kvasir.router.framed_process import FramedProcess

log = logging.getLogger(__name__)

_NUM_CACHED = 1024
_MAX_CACHED_CHARS = 4 << 20
_REFUSAL_IS_KNOWN_FOR_S = 60.0  # what took too long or too much may have been the machine's fault


@dataclass(frozen=True, slots=True)
class Verdict:
    grammar: Grammar  # as nodes are to have it
    error: str | None = None
    until_s: float = float("inf")

    @property
    def num_chars(self) -> int:
        return len(self.grammar.source) + len(self.error or "")


class GrammarChecker:
    """Workers start with the first grammar. Belongs to one event loop."""

    def __init__(
        self,
        tokenizer_path: Path,
        *,
        num_workers: int = 2,
        timeout_s: float = 1.5,
        max_source_bytes: int = 1 << 20,
        max_waiting: int = 64,
    ) -> None:
        self._workers = [Worker(tokenizer_path, timeout_s) for _ in range(num_workers)]
        self._idle = list(self._workers)
        self._free = asyncio.Semaphore(num_workers)
        self._max_source_bytes = max_source_bytes
        self._max_waiting = max_waiting
        self._verdicts: OrderedDict[Grammar, Verdict] = OrderedDict()
        self._asking: dict[Grammar, asyncio.Task[Verdict]] = {}

    async def check(self, grammar: Grammar, param: str) -> Grammar:
        """The grammar as nodes are to have it. Raises InvalidRequest that says what is wrong, for the field `param`."""
        num_bytes = len(grammar.source.encode())
        if num_bytes > self._max_source_bytes:
            message = f"'{param}' has {num_bytes} bytes, and may have at most {self._max_source_bytes}"
            raise InvalidRequest(message, param, "grammar_too_large")
        verdict = self._known(grammar) or await self._asked(grammar)
        if verdict.error is not None:
            raise InvalidRequest(f"invalid '{param}': {verdict.error}", param, "invalid_grammar")
        return verdict.grammar

    async def close(self) -> None:
        for task in self._asking.values():
            task.cancel()
        await asyncio.gather(*self._asking.values(), return_exceptions=True)
        await asyncio.gather(*(worker.close() for worker in self._workers))

    def _known(self, grammar: Grammar) -> Verdict | None:
        verdict = self._verdicts.get(grammar)
        if verdict is None or verdict.until_s < time.monotonic():
            return None
        self._verdicts.move_to_end(grammar)
        return verdict

    async def _asked(self, grammar: Grammar) -> Verdict:
        """Asked once, however many want to know; a client that leaves takes the answer from nobody else."""
        task = self._asking.get(grammar)
        if task is None:
            if len(self._asking) >= self._max_waiting:
                raise Overloaded(f"{len(self._asking)} grammars wait to be compiled")
            task = self._asking[grammar] = asyncio.create_task(self._ask(grammar))
            task.add_done_callback(lambda _: self._asking.pop(grammar, None))
        return await asyncio.shield(task)

    async def _ask(self, grammar: Grammar) -> Verdict:
        async with self._free:
            worker = self._idle.pop()
            try:
                verdict = await worker.ask(grammar)
            finally:
                self._idle.append(worker)
        self._verdicts[grammar] = verdict
        num_chars = sum(cached.num_chars for cached in self._verdicts.values())
        while len(self._verdicts) > _NUM_CACHED or num_chars > _MAX_CACHED_CHARS:
            num_chars -= self._verdicts.popitem(last=False)[1].num_chars
        return verdict


class Worker:
    """One compiling process, started when it is needed and again after it has been lost."""

    def __init__(self, tokenizer_path: Path, timeout_s: float) -> None:
        self._tokenizer_path = tokenizer_path
        self._timeout_s = timeout_s
        self._process: FramedProcess | None = None
        self._starting: asyncio.Task[FramedProcess] | None = None

    async def ask(self, grammar: Grammar) -> Verdict:
        """Raises Overloaded if no process can be had."""
        for _ in range(2):  # once again, for what ended the process may have been somebody else
            process = await self._running()
            try:
                async with own_timeout(self._timeout_s):
                    asked = json.dumps({"kind": grammar.kind, "source": grammar.source}).encode()
                    answer = json.loads(await process.ask(asked))
                return Verdict(Grammar(grammar.kind, answer.get("source", grammar.source)), answer.get("error"))
            except TimeoutError:
                await self._replace()
                limit = f"the {self._timeout_s:g} s that a grammar may take to compile"
                return _refusal(grammar, f"it takes more than {limit}")
            except (EOFError, OSError):
                await self._replace()
            except BaseException:  # we are being closed: the answer would be taken for the next one's
                await self._end()
                raise
        return _refusal(grammar, "it takes more memory than a grammar may take to compile")

    async def close(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
            with suppress(asyncio.CancelledError, Overloaded):
                self._process = await self._starting
        await self._end()

    async def _running(self) -> FramedProcess:
        if self._process is None or not self._process.is_alive:
            await self._end()
            try:
                self._process = await (self._starting or self._start())
            finally:
                self._starting = None
        return self._process

    async def _replace(self) -> None:
        """At once, so that the next grammar need not wait for it."""
        await self._end()
        self._starting = asyncio.create_task(self._start())

    async def _start(self) -> FramedProcess:
        seconds = str(int(self._timeout_s) + 10)
        try:
            process = await FramedProcess.start("kvasir.router.grammar.worker", str(self._tokenizer_path), seconds)
        except (TimeoutError, EOFError, OSError) as error:
            log.error("the compiler of grammars does not start: %r", error)
            raise Overloaded("grammars cannot be compiled now") from None
        if problem := json.loads(process.ready).get("error"):
            log.error("no grammar can be compiled: %s", problem)
        return process

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.end()


def _refusal(grammar: Grammar, reason: str) -> Verdict:
    log.warning("a grammar of %d characters is refused: %s", len(grammar.source), reason)
    return Verdict(grammar, reason, time.monotonic() + _REFUSAL_IS_KNOWN_FOR_S)

"""Requests whose answers must keep to a grammar: asked for by the client, checked before any node hears of it."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from kvasir.common.errors import InvalidRequest
from kvasir.common.grammar import Grammar
from kvasir.router.grammar.checker import GrammarChecker
from kvasir.router.types import RoutedRequest

_MAX_BLAMING_S = 2.0


def with_grammar(request: RoutedRequest, grammar: Grammar | None) -> RoutedRequest:
    return replace(request, sampling=replace(request.sampling, grammar=grammar))


async def checked(
    requests: Sequence[RoutedRequest], checker: GrammarChecker, asked: Mapping[str, Grammar]
) -> list[RoutedRequest]:
    """With grammars as nodes are to have them. Raises InvalidRequest for that field of `asked`, of which they are made,
    that is at fault."""
    grammars = {request.sampling.grammar for request in requests} - {None}  # few: choices share theirs
    param = next(iter(asked)) if len(asked) == 1 else "tools"
    try:
        ready: dict[Grammar | None, Grammar] = {
            grammar: await checker.check(grammar, param) for grammar in grammars if grammar is not None
        }
    except InvalidRequest:
        with suppress(TimeoutError):
            async with asyncio.timeout(_MAX_BLAMING_S):
                for name, part in asked.items():
                    await checker.check(part, name)
        raise
    return [with_grammar(request, ready.get(request.sampling.grammar)) if ready else request for request in requests]

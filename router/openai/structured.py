"""Requests whose answers must keep to a grammar: asked for by the client, checked before any node hears of it."""

from collections.abc import Sequence
from dataclasses import replace

from kvasir.common.grammar import Grammar
from kvasir.router.grammar.checker import GrammarChecker
from kvasir.router.types import RoutedRequest


def with_grammar(request: RoutedRequest, grammar: Grammar | None) -> RoutedRequest:
    return replace(request, sampling=replace(request.sampling, grammar=grammar))


async def checked(requests: Sequence[RoutedRequest], checker: GrammarChecker, param: str) -> list[RoutedRequest]:
    """With grammars as nodes are to have them. Raises InvalidRequest for the field `param`."""
    grammars = {request.sampling.grammar for request in requests} - {None}  # few: choices share theirs
    ready: dict[Grammar | None, Grammar] = {
        grammar: await checker.check(grammar, param) for grammar in grammars if grammar is not None
    }
    return [with_grammar(request, ready.get(request.sampling.grammar)) if ready else request for request in requests]

"""Holds outputs to grammars: compiled off the engine's thread, then followed token by token.

A matcher's place in its grammar is a function of the output so far alone. It is never sent anywhere: on another node,
a fresh matcher reads the tokens that came with the request.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from kvasir.common.grammar import Grammar
from kvasir.common.grammar_compiler import GrammarError, check, compile_grammar, load_tokenizer

_NUM_THREADS = 2
_NUM_CACHED = 32
_MAX_CACHED_CHARS = 4 << 20  # of all cached sources together
_MAX_RECOMPILE_S = 0.05  # of computing, in the middle of a step: everybody waits for it


class GrammarMatcher:
    """A `Matcher`. Not thread-safe.

    A cached grammar's matchers share what its lexer has learnt, and a lexer can be full: then this one goes on with a
    lexer of its own, so that nobody's output depends on who else uses the grammar.
    """

    def __init__(self, tokenizer: LLTokenizer, shared: LLMatcher, compile_own: Callable[[], LLMatcher]) -> None:
        self._matcher = shared
        self._compile_own: Callable[[], LLMatcher] | None = compile_own
        self._vocab_size = tokenizer.vocab_size
        self._end_token_ids = tokenizer.eos_tokens
        self._token_ids: list[int] = []

    @property
    def is_complete(self) -> bool:
        return self._matcher.is_stopped() and self._matcher.is_accepting()  # which a matcher that has failed is not

    def follow(self, output_token_ids: Sequence[int]) -> None:
        self._read(output_token_ids[len(self._token_ids) :])

    def take(self, token_id: int) -> None:
        self._read([token_id])

    def allowed(self, stop_token_ids: Collection[int]) -> NDArray[np.bool_]:
        packed = np.frombuffer(self._bitmask(), np.uint8)
        bits = np.unpackbits(packed, count=self._vocab_size, bitorder="little").view(np.bool_)
        if not bits.any() or (self._matcher.is_stopped() and not self._matcher.is_accepting()):
            raise GrammarError("the grammar has come to a point at which no token can follow")
        not_stopping = [token_id for token_id in self._end_token_ids if token_id not in stop_token_ids]
        if not_stopping and bits.sum() > bits[not_stopping].sum():
            bits[not_stopping] = False
        return bits

    def _read(self, token_ids: Sequence[int]) -> None:
        self._token_ids += token_ids
        if token_ids and not self._matcher.consume_tokens(list(token_ids)):
            self._begin_anew()

    def _bitmask(self) -> bytes:
        bitmask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            self._begin_anew()
            bitmask = self._matcher.compute_bitmask()
            check(self._matcher)
        return bitmask

    def _begin_anew(self) -> None:
        if self._compile_own is None:
            check(self._matcher)
            return
        self._matcher, self._compile_own = self._compile_own(), None
        self._matcher.consume_tokens(self._token_ids)
        check(self._matcher)


Compiled = Callable[[], GrammarMatcher]


class Grammars:
    """Compiles grammars in threads of its own, and remembers the last ones. Any thread may call.

    A compiled grammar is a function that gives fresh matchers, at no cost.
    """

    def __init__(self, tokenizer_path: Path, vocab_size: int, end_token_ids: Collection[int]) -> None:
        self._tokenizer_path = tokenizer_path
        self._vocab_size = vocab_size
        self._end_token_ids = end_token_ids
        self._tokenizer: LLTokenizer | None = None  # loaded for the first grammar: most nodes never need it
        self._tokenizer_lock = threading.Lock()
        self._lock = threading.Lock()  # of the cache: never held for long
        self._cache: OrderedDict[Grammar, Compiled] = OrderedDict()
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammar")

    def cached(self, grammar: Grammar) -> Compiled | None:
        with self._lock:
            compiled = self._cache.get(grammar)
            if compiled is not None:
                self._cache.move_to_end(grammar)
            return compiled

    def compiled(self, grammar: Grammar) -> Compiled:
        """Raises GrammarError."""
        compiled = self.cached(grammar)
        if compiled is None:
            compiled = self._compile(grammar)
            with self._lock:
                self._cache[grammar] = compiled
                num_chars = sum(len(cached.source) for cached in self._cache)
                while len(self._cache) > _NUM_CACHED or num_chars > _MAX_CACHED_CHARS:
                    num_chars -= len(self._cache.popitem(last=False)[0].source)
        return compiled

    def start(self, grammar: Grammar, done: Callable[[Compiled | Exception], None]) -> None:
        """`done` is called once: at once if the grammar is known, else in a thread."""
        compiled = self.cached(grammar)
        if compiled is not None:
            done(compiled)
            return

        def work() -> None:
            outcome: Compiled | Exception = GrammarError("the compiler of grammars has failed")
            try:
                outcome = self.compiled(grammar)
            except Exception as error:
                outcome = error
            finally:  # after a panic of the library too, which is no Exception
                done(outcome)

        self._threads.submit(work)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _load_tokenizer(self) -> LLTokenizer:
        with self._tokenizer_lock:
            if self._tokenizer is None:
                self._tokenizer = load_tokenizer(self._tokenizer_path, self._vocab_size, self._end_token_ids)
            return self._tokenizer

    def _compile(self, grammar: Grammar) -> Compiled:
        tokenizer = self._load_tokenizer()
        began_s = time.thread_time()
        shared = compile_grammar(tokenizer, grammar)
        took_s = time.thread_time() - began_s

        def compile_own() -> LLMatcher:
            with self._lock:
                self._cache.pop(grammar, None)  # its lexer may be the one that is full
            if took_s > _MAX_RECOMPILE_S:
                raise GrammarError("the grammar is too complex to be followed any further")
            return compile_grammar(tokenizer, grammar)

        return lambda: GrammarMatcher(tokenizer, shared.deep_copy(), compile_own)

"""Text to token ids, and what each id stands for. The only place that knows the tokenizers library."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from kvasir.router.text.token_bytes import UnsupportedTokenizer, token_bytes

_SHORT_CHARS = 2000  # tokenized on the event loop: handing it to a thread would cost more


class TextTokenizer:
    """A model's tokenizer. `special_tokens` are those with a role, as templates want them: {'bos_token': '<s>'}."""

    def __init__(self, tokenizer: Tokenizer, special_tokens: dict[str, str]) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.special_tokens = special_tokens
        self._tokenizer = tokenizer
        self._bytes = token_bytes(tokenizer)
        added = tokenizer.get_added_tokens_decoder()
        self.all_special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.special_texts = {token_id: self.decode([token_id]) for token_id in self.all_special_ids}
        self._max_token_bytes = max(map(len, self._bytes), default=0)
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenizer")

    @classmethod
    def load(cls, model_dir: Path) -> "TextTokenizer":
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise UnsupportedTokenizer(f"{path} does not exist; a model needs a tokenizer of the tokenizers library")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises no other
            raise UnsupportedTokenizer(f"{path} cannot be read: {error}") from error
        return cls(tokenizer, _special_tokens(read_tokenizer_config(model_dir)))

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """What the tokenizer's own settings name; the model's files may name more."""
        eos = self.special_tokens.get("eos_token")
        token_id = None if eos is None else self._tokenizer.token_to_id(eos)
        return frozenset() if token_id is None else frozenset({token_id})

    def special_ids(self, texts: frozenset[str]) -> frozenset[int]:
        """Those of these texts that are special tokens."""
        if not texts:
            return frozenset()
        return frozenset(token_id for token_id, text in self.special_texts.items() if text in texts)

    def bytes_of(self, token_id: int) -> bytes:
        """Models pad their vocabulary: an id without a token has no text."""
        return self._bytes[token_id] if token_id < len(self._bytes) else b""

    def name_of(self, token_id: int) -> str:
        """As the vocabulary has it: 'Ġhi'."""
        return str(self._tokenizer.id_to_token(token_id) or "")

    def decode(self, token_ids: list[int]) -> str:
        """Special tokens included."""
        return b"".join(map(self.bytes_of, token_ids)).decode(errors="replace")

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """A text that already begins with the BOS token gets no second one."""
        bos = self.special_tokens.get("bos_token")
        if bos and text.startswith(bos):
            add_special_tokens = False
        # The batch call is the one that releases the GIL.
        [encoding] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return encoding.ids

    async def encode_off_loop(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """As `encode`; a long text does not keep other streams waiting."""
        if len(text) <= _SHORT_CHARS:
            return self.encode(text, add_special_tokens=add_special_tokens)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(
            self._threads, lambda: self.encode(text, add_special_tokens=add_special_tokens)
        )

    def must_exceed(self, text: str, num_tokens: int) -> bool:
        """Whether the text is so long that it cannot have `num_tokens` tokens or fewer; cheap, for hostile lengths."""
        return len(text) > self.max_chars(num_tokens)

    def max_chars(self, num_tokens: int) -> int:
        """No text that is longer has so few tokens. The factor leaves room for normalizers, which compose up to three
        characters into one."""
        return 4 * self._max_token_bytes * num_tokens

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)


def read_tokenizer_config(model_dir: Path) -> dict[str, Any]:
    path = model_dir / "tokenizer_config.json"
    config: dict[str, Any] = json.loads(path.read_bytes()) if path.is_file() else {}
    return config


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """{"bos_token": "<s>"} or {"bos_token": {"content": "<s>", ...}} -> {"bos_token": "<s>"}"""
    tokens: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"):
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            tokens[name] = text
    return tokens

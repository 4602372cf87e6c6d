"""A model directory's tokenizer, for prompts of an exact length."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer


class DirectoryTokenizer:
    """Reads `tokenizer.json`; adds no special tokens of its own."""

    def __init__(self, directory: Path) -> None:
        path = directory / "tokenizer.json" if directory.is_dir() else directory
        if not path.is_file():
            raise ValueError(f"{path} does not exist; --tokenizer wants a model directory or a tokenizer.json")
        self._tokenizer = FastTokenizer.from_file(str(path))

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)

    @cached_property
    def plain_ids(self) -> Sequence[int]:
        special = set(self._tokenizer.get_added_tokens_decoder())
        return [token for token in range(self._tokenizer.get_vocab_size()) if token not in special]

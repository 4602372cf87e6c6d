"""Tokenizers small enough to make in a test: bytes and a few longer tokens."""

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from kvasir.router.text.tokenizer import TextTokenizer

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def byte_level() -> TextTokenizer:
    """As Llama 3, Qwen and SmolLM: every byte is a token; 'he', 'll' and ' w' are merged."""
    return TextTokenizer(_byte_level(), SPECIAL_TOKENS)


def save_byte_level(directory: Path) -> Path:
    """Its tokenizer.json."""
    path = directory / "tokenizer.json"
    _byte_level().save(str(path))
    return path


def _byte_level() -> Tokenizer:
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("Ġ", "w")]
    vocabulary = {token: index for index, token in enumerate([*tokens, *("".join(merge) for merge in merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>"), AddedToken("</s>"), AddedToken("<|end|>")])
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    return tokenizer


def byte_fallback() -> TextTokenizer:
    """As Llama 2 and Mistral: words with a marked space, and bytes for what no token holds."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁he", "llo", "h", "e", "l", "o"]
    vocabulary = {token: index for index, token in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<unk>"), AddedToken("<s>"), AddedToken("</s>")])
    return TextTokenizer(tokenizer, SPECIAL_TOKENS)

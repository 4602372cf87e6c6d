"""What the fields of a GGUF file mean, whatever the model."""

from typing import Any

import numpy as np

# Kinds of tokens
CONTROL = 3  # special: no part of a text
USER_DEFINED = 4  # taken out of a text before anything else, longest first


def shortest(value: float) -> float:
    """The number that was meant: GGUF stores float32.   9.999999747378752e-06  ->  1e-05"""
    return float(str(np.float32(value)))


def tokens_of_kind(fields: dict[str, Any], wanted: int) -> list[str]:
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    return [token for token, kind in zip(tokens, kinds, strict=True) if kind == wanted]

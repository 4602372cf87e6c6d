"""The forms in which a block travels or is stored, by name: a codec, and the dtype of the node that computed it.

What the codecs do is in `codec.py`.
"""

from dataclasses import replace
from functools import lru_cache

from kvasir.engine.blocks import KVLayout

CODEC_NONE, CODEC_LOSSLESS, CODEC_AUTO = "none", "lossless", "auto"  # auto: one of these two
LOSSY = ("fp16", "int8", "fp8")
CODECS = (CODEC_NONE, CODEC_LOSSLESS, *LOSSY)  # those that a header may name
CODEC_SETTINGS = (CODEC_AUTO, *CODECS)  # those that a node may be told to use
DTYPES = ("float32", "bfloat16", "float16", "int8")
_LOSSY_FORMS = {f"{codec}-{dtype}" for codec in LOSSY for dtype in DTYPES if dtype != "int8"}
STORED_FORMS = frozenset(_LOSSY_FORMS | {f"exact-{dtype}" for dtype in DTYPES})


def codec_for(codec: str, layout: KVLayout) -> str:
    """The codec itself if it makes a block of this layout smaller, else `none`."""
    return CODEC_NONE if layout.dtype == "int8" and codec in LOSSY else codec


def is_exact(codec: str, sender: KVLayout, into: KVLayout) -> bool:
    """Whether a decoded block is, bit by bit, what a node with layout `into` computes."""
    loses_nothing = codec in (CODEC_NONE, CODEC_LOSSLESS) or (codec, sender.dtype) == ("fp16", "float16")
    return loses_nothing and sender.dtype == into.dtype


@lru_cache(maxsize=64)
def is_convertible(sender: KVLayout, into: KVLayout) -> bool:
    """Whether the layouts have the same values in the same order. Their dtypes may differ."""
    return sender.dtype in DTYPES and replace(sender, dtype=into.dtype) == into


def stored_as(codec: str, layout: KVLayout) -> str:
    """The form in which blocks are stored, which is part of their keys. All exact blocks of a dtype share one form."""
    kind = "exact" if is_exact(codec_for(codec, layout), layout, layout) else codec
    return f"{kind}-{layout.dtype}"

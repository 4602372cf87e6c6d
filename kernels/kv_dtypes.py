"""The dtypes of the KV cache, and what a key or value of one head takes in each.

    float32, bfloat16, float16      of one head in a block: values [B, D]
    int8                            of one head in a block: values [B, D] | scales as float32 [B]

Heads lie one behind the other, so that a block, and any range of its heads, is one piece of bytes whatever the dtype.
"""

VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
SCALE_BYTES = 4  # of one token of one head, where the dtype is int8


def row_bytes(dtype: str, head_dim: int) -> int:
    """Of one token's key, or value, of one head; its scale included."""
    return head_dim * VALUE_BYTES[dtype] + (SCALE_BYTES if dtype == "int8" else 0)


def row_length(dtype: str, head_dim: int) -> int:
    """The same in elements of the dtype: the last dimension of a cache [N, L, 2, K, B, row length]."""
    return row_bytes(dtype, head_dim) // VALUE_BYTES[dtype]

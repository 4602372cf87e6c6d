"""Root-mean-square normalisation of each query head and each key head, where they lie."""

from torch import Tensor

from kvasir.kernels.backend import is_triton
from kvasir.kernels.rms_norm import rms_norm, rms_norm_reference

# Shapes: T tokens  H query heads  K KV heads  D head dim


def qk_norm(
    qkv: Tensor, query_weight: Tensor, key_weight: Tensor, num_heads: int, num_kv_heads: int, eps: float
) -> None:
    """qkv [T, >= (H + K) D]: queries, then keys, of each token, normalised in place; what follows them stays.

    query_weight, key_weight: [D], of all query heads and of all key heads
    """
    if is_triton(qkv):
        from kvasir.kernels.triton import qk_norm as kernel

        return kernel.qk_norm(qkv, query_weight, key_weight, num_heads, num_kv_heads, eps)
    head_dim = len(query_weight)
    for weight, first, last in ((query_weight, 0, num_heads), (key_weight, num_heads, num_heads + num_kv_heads)):
        heads = qkv[:, first * head_dim : last * head_dim]
        heads.copy_(rms_norm(heads.contiguous().view(-1, head_dim), weight, eps).view(heads.shape))
    return None


def qk_norm_reference(
    qkv: Tensor, query_weight: Tensor, key_weight: Tensor, num_heads: int, num_kv_heads: int, eps: float
) -> None:
    head_dim = len(query_weight)
    heads = qkv.view(len(qkv), qkv.shape[1] // head_dim, head_dim)
    queries, keys = heads[:, :num_heads], heads[:, num_heads : num_heads + num_kv_heads]
    queries.copy_(rms_norm_reference(queries, query_weight, eps))
    keys.copy_(rms_norm_reference(keys, key_weight, eps))

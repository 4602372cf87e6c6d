"""What the launchers ask about the machine."""

from functools import cache

import torch
import triton.language as tl
from torch import Tensor

from kvasir.kernels.backend import is_interpreted

TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


# Triton compiles a kernel anew for an integer that is 1, or a multiple of 16, and for a pointer that is one: a pause of
# seconds in the middle of serving. Of these it shall not, for they are another at each step: a number of sequences, a
# table's width, where a slice of a table begins. A name that a kernel does not have is no matter.
FEW_VARIANTS = {
    "do_not_specialize": ["num_sequences", "table_stride"],
    "do_not_specialize_on_alignment": ["block_tables_ptr", "query_starts_ptr", "seq_lens_ptr", "slots_ptr"],
}


def dot_type(tensor: Tensor) -> tl.dtype:
    """The type that `tl.dot` is given: the tensor's own.

    The interpreter multiplies the bit patterns of bfloat16 as if they were numbers, and rounds the sums of float16:
    there a kernel converts to float32 as soon as it has loaded.
    """
    return tl.float32 if is_interpreted() else TYPES[tensor.dtype]


def num_processors(tensor: Tensor) -> int:
    """Streaming multiprocessors of the tensor's GPU. Interpreted programs run one by one: a small number will do."""
    return _multi_processor_count(tensor.get_device()) if tensor.is_cuda else 2


def capability(tensor: Tensor) -> int:
    """Of the tensor's GPU: 80 for A100, 90 for H100 and H200. Interpreted: 0."""
    return _capability(tensor.get_device()) if tensor.is_cuda else 0


@cache
def _capability(device: int) -> int:
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@cache
def _multi_processor_count(device: int) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)

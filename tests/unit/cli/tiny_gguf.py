"""A Llama of one layer as a GGUF file."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quantize
from numpy.typing import NDArray

HIDDEN, FEED_FORWARD, HEADS, KV_HEADS = 64, 96, 4, 2


def permute(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """What llama.cpp does to the rows of Q and K when it writes a GGUF file."""
    rows, columns = weight.shape
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def tiny_weights() -> dict[str, NDArray[np.float32]]:
    """A Llama of one layer, as it should come out."""
    rng = np.random.default_rng(7)
    kv_rows = HIDDEN // HEADS * KV_HEADS
    shapes = {
        "model.embed_tokens.weight": (260, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "model.layers.0.input_layernorm.weight": (HIDDEN,),
        "model.layers.0.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
        "model.layers.0.self_attn.k_proj.weight": (kv_rows, HIDDEN),
        "model.layers.0.self_attn.v_proj.weight": (kv_rows, HIDDEN),
        "model.layers.0.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        "model.layers.0.post_attention_layernorm.weight": (HIDDEN,),
        "model.layers.0.mlp.gate_proj.weight": (FEED_FORWARD, HIDDEN),
        "model.layers.0.mlp.up_proj.weight": (FEED_FORWARD, HIDDEN),
        "model.layers.0.mlp.down_proj.weight": (HIDDEN, FEED_FORWARD),
    }
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "model.layers.0.input_layernorm.weight": "blk.0.attn_norm.weight",
    "model.layers.0.self_attn.q_proj.weight": "blk.0.attn_q.weight",
    "model.layers.0.self_attn.k_proj.weight": "blk.0.attn_k.weight",
    "model.layers.0.self_attn.v_proj.weight": "blk.0.attn_v.weight",
    "model.layers.0.self_attn.o_proj.weight": "blk.0.attn_output.weight",
    "model.layers.0.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
    "model.layers.0.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
    "model.layers.0.mlp.up_proj.weight": "blk.0.ffn_up.weight",
    "model.layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
}


def write_tiny_gguf(path: Path, edit: Callable[[GGUFWriter], None] = lambda writer: None) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100_000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    writer.add_token_list(specials + [chr(0x100 + byte) for byte in range(256)] + ["\u0120\u0121"])
    writer.add_token_types([TokenType.CONTROL] * 3 + [TokenType.NORMAL] * 257)
    writer.add_token_merges(["\u0120 \u0121"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template("{{ messages }}")
    for name, weight in tiny_weights().items():
        stored = weight
        if "q_proj" in name:
            stored = permute(weight, HEADS)
        elif "k_proj" in name:
            stored = permute(weight, KV_HEADS)
        if "embed_tokens" in name:
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(GGUF_NAMES[name], quantize(stored, kind), raw_dtype=kind)
        else:
            writer.add_tensor(GGUF_NAMES[name], stored)
    edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path

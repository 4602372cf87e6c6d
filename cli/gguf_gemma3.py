"""Gemma 3 (text) in a GGUF file."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from kvasir.cli.gguf_fields import (
    CONTROL,
    USER_DEFINED,
    refuse_other_values,
    shortest,
    tensor_name,
    tokens_of_kind,
)

_END_OF_TURN = "<end_of_turn>"
_SPACE = "\u2581"  # what stands for a space in a vocabulary of sentencepiece

_LAYER_TENSOR_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def tensor(name: str, weight: NDArray[np.float32], config: dict[str, Any]) -> tuple[str, NDArray[np.float32]]:
    """As Hugging Face has it: the weight of a norm says how far it is from 1."""
    name = tensor_name(name, _LAYER_TENSOR_NAMES)
    return name, weight - np.float32(1) if name.endswith("norm.weight") else weight


def refuse_the_unknown(fields: dict[str, Any]) -> None:
    expected = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.add_bos_token": True,
        "gemma3.attention.value_length": fields["gemma3.attention.key_length"],
    }
    refuse_other_values(fields, expected)
    if fields.get("tokenizer.ggml.add_space_prefix"):
        raise ValueError("tokenizer.ggml.add_space_prefix is set; that cannot be converted")
    for name in fields:
        if name.startswith("gemma3.rope.scaling.") or name.endswith("softcapping"):
            raise ValueError(f"{name} is set; that cannot be converted")


def model_config(fields: dict[str, Any]) -> dict[str, Any]:
    num_layers, num_heads = fields["gemma3.block_count"], fields["gemma3.attention.head_count"]
    hidden_size, head_dim = fields["gemma3.embedding_length"], fields["gemma3.attention.key_length"]
    is_largest = num_layers == 62  # the model of 27B scales its queries by another number
    return {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "head_dim": head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": hidden_size,
        "intermediate_size": fields["gemma3.feed_forward_length"],
        "max_position_embeddings": fields["gemma3.context_length"],
        "num_attention_heads": num_heads,
        "num_hidden_layers": num_layers,
        "num_key_value_heads": fields["gemma3.attention.head_count_kv"],
        "query_pre_attn_scalar": hidden_size // num_heads if is_largest else head_dim,
        "rms_norm_eps": shortest(fields["gemma3.attention.layer_norm_rms_epsilon"]),
        "rope_theta": shortest(fields["gemma3.rope.freq_base"]),
        "rope_local_base_freq": 10000.0,  # of all Gemma 3; the file does not say
        "sliding_window": fields["gemma3.attention.sliding_window"],
        "sliding_window_pattern": 6,  # of all Gemma 3, too
        "tie_word_embeddings": True,  # an untied head would be a tensor that tensor() refuses
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
    }


def generation_config(fields: dict[str, Any]) -> dict[str, Any]:
    ends = [fields["tokenizer.ggml.eos_token_id"]]
    if "tokenizer.chat_template" in fields:
        ends.append(fields["tokenizer.ggml.tokens"].index(_END_OF_TURN))
    return {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": ends,
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def tokenizer(fields: dict[str, Any]) -> Tokenizer:
    unknown, bos = (fields["tokenizer.ggml.tokens"][fields[f"tokenizer.ggml.{name}_token_id"]]
                    for name in ("unknown", "bos"))  # fmt: skip
    own = {token: token.replace(" ", _SPACE) for token in tokens_of_kind(fields, USER_DEFINED)}
    vocabulary = {own.get(token, token): i for i, token in enumerate(fields["tokenizer.ggml.tokens"])}
    built = Tokenizer(
        models.BPE(vocabulary, _merges(fields, vocabulary), unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    built.normalizer = normalizers.Replace(" ", _SPACE)
    built.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    built.add_special_tokens([AddedToken(token, normalized=False) for token in tokens_of_kind(fields, CONTROL)])
    built.add_tokens([AddedToken(token, normalized=True) for token in own.values()])
    built.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, vocabulary[bos])]
    )
    return built


def _merges(fields: dict[str, Any], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Sentencepiece joins whatever two neighbours make the token of the highest score; here the order says which."""
    names = ("tokens", "scores", "token_type")
    merges: list[tuple[float, int, int, str, str]] = []
    for token, score, kind in zip(*(fields[f"tokenizer.ggml.{name}"] for name in names), strict=True):
        if kind in (CONTROL, USER_DEFINED):  # never made of parts
            continue
        for cut in range(1, len(token)):
            left, right = vocabulary.get(token[:cut]), vocabulary.get(token[cut:])
            if left is not None and right is not None:
                merges.append((-score, left, right, token[:cut], token[cut:]))
    return [(left, right) for _, _, _, left, right in sorted(merges)]


def tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": True,
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "chat_template": fields.get("tokenizer.chat_template"),
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": fields["gemma3.context_length"],
    }
    return {name: value for name, value in config.items() if value is not None}

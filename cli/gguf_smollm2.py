"""SmolLM2 in a GGUF file."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from kvasir.cli.gguf_fields import CONTROL, refuse_other_values, shortest, tensor_name, tokens_of_kind

_END_OF_TEXT = "<|endoftext|>"

_LAYER_TENSOR_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def tensor(name: str, weight: NDArray[np.float32], config: dict[str, Any]) -> tuple[str, NDArray[np.float32]]:
    """As Hugging Face has it."""
    name = tensor_name(name, _LAYER_TENSOR_NAMES)
    if name.endswith("q_proj.weight"):
        weight = unpermute(weight, config["num_attention_heads"])
    elif name.endswith("k_proj.weight"):
        weight = unpermute(weight, config["num_key_value_heads"])
    return name, weight


def unpermute(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Undo llama.cpp's order of the rows of Q and K.

    It rotates neighbours (0, 1), (2, 3), ..; Hugging Face rotates halves (0, D/2), (1, D/2 + 1), ..
    """
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def refuse_the_unknown(fields: dict[str, Any]) -> None:
    head_dim = fields["llama.embedding_length"] // fields["llama.attention.head_count"]
    expected = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "llama.rope.dimension_count": head_dim,
    }
    refuse_other_values(fields, expected)
    for name in fields:
        if name.startswith("llama.rope.scaling."):
            raise ValueError(f"{name} is set; rope scaling cannot be converted")


def model_config(fields: dict[str, Any]) -> dict[str, Any]:
    num_heads = fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "head_dim": fields["llama.embedding_length"] // num_heads,
        "hidden_act": "silu",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": num_heads,
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "rms_norm_eps": shortest(fields["llama.attention.layer_norm_rms_epsilon"]),
        "rope_scaling": None,
        "rope_theta": shortest(fields["llama.rope.freq_base"]),
        "tie_word_embeddings": True,  # an untied head would be a tensor that tensor_name() refuses
        "torch_dtype": "float32",
        "use_cache": True,
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
    }


def generation_config(fields: dict[str, Any]) -> dict[str, Any]:
    end_of_turn = fields["tokenizer.ggml.eos_token_id"]
    # GGUF has room for one end of sequence; text that is no chat ends with the other.
    end_of_text = fields["tokenizer.ggml.tokens"].index(_END_OF_TEXT)
    return {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": [end_of_turn, end_of_text],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def tokenizer(fields: dict[str, Any]) -> Tokenizer:
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields["tokenizer.ggml.merges"]]
    built = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    # "smollm": each digit stands alone. Without it, blanks before a digit fall apart differently.
    built.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens([AddedToken(token, normalized=False) for token in tokens_of_kind(fields, CONTROL)])
    return built


def tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": fields["tokenizer.ggml.add_bos_token"],
        "add_prefix_space": fields["tokenizer.ggml.add_space_prefix"],
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "additional_special_tokens": tokens_of_kind(fields, CONTROL),
        "chat_template": fields["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": fields["llama.context_length"],
    }

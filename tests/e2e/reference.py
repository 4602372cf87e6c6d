"""What `transformers` answers, token by token: the 24 prompts of the parity tests and their reference outputs.

Greedy, 64 tokens, fp32, one prompt at a time. `reference.json` beside this file holds the answers, since they take
minutes to compute; `python -m tests.e2e.reference MODEL_DIR` computes them anew, and `test_reference.py` holds each
of them against one forward pass of `transformers`.
"""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

NUM_OUTPUT_TOKENS = 64
PATH = Path(__file__).with_suffix(".json")

# Around the block size 16, around the chunk size 512, and one of four chunks.
PROMPT_LENGTHS = (1, 5, 15, 16, 17, 31, 33, 48, 64, 100, 140, 200, 511, 512, 513, 2000)
CHATS = (
    "What is the capital of France?",
    "Count from one to ten.",
    "Write a haiku about the sea.",
    "Why is the sky blue? Answer in one sentence.",
    "Translate 'good morning' to German.",
    "Name three prime numbers  42 and above.",
    "Explain photosynthesis to a child.",
    "Schreibe einen Satz über Zürich. 🙂",
)


@dataclass(frozen=True)
class Prompt:
    name: str
    token_ids: tuple[int, ...]
    chat: str | None = None  # the user's message, where the prompt goes through the chat template


@dataclass(frozen=True)
class Answer:
    token_ids: tuple[int, ...]
    # Per position, the reference's best two logits and the second-best token.
    margins: tuple[float, ...]
    runners_up: tuple[int, ...]


def prompts(model_dir: Path) -> list[Prompt]:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model_dir)
    text = (Path(__file__).parents[2] / "LICENSE").read_text()
    ids = tokenizer(text)["input_ids"]
    ids = [*ids, *ids]
    cut = [Prompt(f"{n}-tokens", tuple(ids[7 * i : 7 * i + n])) for i, n in enumerate(PROMPT_LENGTHS)]
    chats = [
        Prompt(
            f"chat-{i}",
            tuple(
                tokenizer.apply_chat_template(
                    [{"role": "user", "content": content}], add_generation_prompt=True, return_dict=False
                )
            ),
            content,
        )
        for i, content in enumerate(CHATS)
    ]
    return cut + chats


def answers() -> dict[str, Answer]:
    """The reference's answers by prompt name."""
    stored = json.loads(PATH.read_text())
    return {name: Answer(*(tuple(column) for column in columns.values())) for name, columns in stored.items()}


def load_model(model_dir: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)


def compute(model_dir: Path) -> None:
    import torch

    model = load_model(model_dir)
    eos = set(model.generation_config.eos_token_id)
    with torch.inference_mode():
        computed = {prompt.name: asdict(_greedy(model, prompt, eos)) for prompt in prompts(model_dir)}
    PATH.write_text(json.dumps(computed, indent=None, separators=(",", ":")).replace('},"', '},\n"') + "\n")


def _greedy(model: Any, prompt: Prompt, eos: set[int]) -> Answer:
    """A chat ends with its end-of-sequence token; the others ignore it."""
    import torch

    token_ids: list[int] = []
    margins: list[float] = []
    runners_up: list[int] = []
    inputs, past = torch.tensor([prompt.token_ids]), None
    while len(token_ids) < NUM_OUTPUT_TOKENS and not (prompt.chat and token_ids and token_ids[-1] in eos):
        out = model(inputs, past_key_values=past, use_cache=True, logits_to_keep=1)
        best = out.logits[0, -1].topk(2)
        token_ids.append(int(best.indices[0]))
        runners_up.append(int(best.indices[1]))
        margins.append(float(best.values[0] - best.values[1]))
        inputs, past = best.indices[:1].view(1, 1), out.past_key_values
    return Answer(tuple(token_ids), tuple(margins), tuple(runners_up))


if __name__ == "__main__":
    compute(Path(sys.argv[1]))

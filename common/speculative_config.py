"""What a node can be told about speculative decoding. Names and meanings are vLLM's."""

from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

_LOOKUP = 5  # vLLM's


class SpeculativeConfig(BaseModel):
    """{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}

    or {"model": DIRECTORY, "num_speculative_tokens": 3}
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    method: Literal["ngram", "draft_model"] | None = Field(
        default=None, description="ngram, or draft_model; default: draft_model where there is a model."
    )
    model: Path | None = Field(default=None, description="draft_model: its directory; with the same tokenizer.")
    num_speculative_tokens: int = Field(gt=0, le=64, description="Tokens proposed to each request, at most.")
    prompt_lookup_max: int | None = Field(default=None, gt=0, description="ngram: most tokens looked for; default 5.")
    prompt_lookup_min: int | None = Field(
        default=None, gt=0, description="ngram: fewest that must be found again; default: prompt_lookup_max."
    )

    @property
    def lookup(self) -> tuple[int, int]:
        """Fewest and most tokens looked for; where one of them is given, it is the other too."""
        return (
            self.prompt_lookup_min or self.prompt_lookup_max or _LOOKUP,
            self.prompt_lookup_max or self.prompt_lookup_min or _LOOKUP,
        )

    @model_validator(mode="after")
    def _is_one_of_the_two(self) -> Self:
        has_lookup = self.prompt_lookup_max is not None or self.prompt_lookup_min is not None
        if self.method is None and self.model is None:
            raise ValueError("either method ngram or a model is wanted")
        if self.method == "ngram" and self.model is not None:
            raise ValueError("method ngram needs no model")
        if self.method == "draft_model" and self.model is None:
            raise ValueError("method draft_model needs a model")
        if self.method != "ngram" and has_lookup:
            raise ValueError("prompt_lookup_max and prompt_lookup_min belong to method ngram")
        shortest, longest = self.lookup
        if shortest > longest:
            raise ValueError(f"prompt_lookup_min of {shortest} is more than prompt_lookup_max of {longest}")
        return self

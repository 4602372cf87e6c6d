"""What a client may send to /v1/responses."""

from itertools import islice
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from kvasir.router.openai.field_schemas import Nothing, ResponseInput
from kvasir.router.openai.models import MAX_TOOLS, WHOLE, Body, GenerationBody, ToolName, one_of

_INT32_MAX = 2**31 - 1
_MOST_METADATA = 16
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=_MOST_METADATA),
    # One too many is as wrong as all of them, which would be looked through first.
    BeforeValidator(lambda data: dict(islice(data.items(), _MOST_METADATA + 1)) if isinstance(data, dict) else data),
]

# Only logprobs can be had; the others are of tools that are not here, or are there in any case.
Includable = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class FunctionTool(Body):
    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool | None = None


class NamedFunction(Body):
    type: Literal["function"]
    name: str


class AllowedFunctions(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


ResponseToolChoice = Annotated[
    Literal["none", "auto", "required"] | Annotated[NamedFunction | AllowedFunctions, Field(discriminator="type")],
    one_of('none, auto, required, or a function as {"type": "function", "name": ...}'),
]


class TextOptions(Body):
    format: dict[str, Any] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(Body):
    effort: Annotated[str, Field(max_length=64)] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesBody(GenerationBody):
    model_config = ConfigDict(json_schema_extra={"required": ["model", "input"]})

    input: ResponseInput = None
    instructions: str | None = None
    previous_response_id: Annotated[str, Field(max_length=256)] | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=_INT32_MAX), WHOLE] | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None
    include: Annotated[list[Includable], Field(max_length=32, fail_fast=True)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: Metadata | None = None  # told again
    max_tool_calls: Annotated[int, Field(ge=1), WHOLE] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    background: bool | None = None
    conversation: Nothing = None
    prompt: Nothing = None  # one that is stored at OpenAI

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.wants_logprobs else None

    @property
    def wants_logprobs(self) -> bool:
        return "message.output_text.logprobs" in (self.include or ()) or bool(self.top_logprobs)

"""What a client may send, field by field. `null` for an optional field means that it is absent.

Types are strict: "5" is no number and true is no integer. What depends on the model or on other fields (token ids,
lengths) is checked where it is used. The first fault is told, so no list is looked through for more: `fail_fast`.
"""

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import PydanticCustomError

from kvasir.router.openai.field_schemas import Content, Nothing, Prompt, ResponseFormat, StopStrings, StructuredOutputs


def whole(value: Any) -> Any:
    """1.0 is 1, as JSON Schema has it: languages with one kind of numbers write what is whole like that."""
    return int(value) if type(value) is float and value.is_integer() and abs(value) < _EXACT else value


_EXACT = 2**53  # from here on, a float may stand for several integers
_INT32_MAX = 2**31 - 1
WHOLE = BeforeValidator(whole)  # behind an integer's bounds
TokenIds = list[Annotated[int, Field(ge=0, le=_INT32_MAX), WHOLE]]
Finite = Annotated[float, Field(allow_inf_nan=False)]
_MOST_BIAS = 100
Bias = Annotated[Finite, Field(ge=-_MOST_BIAS, le=_MOST_BIAS)]
MAX_CHOICES = 128  # in one request, over all its prompts
MAX_TOOLS = 512
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.\-]{1,128}$")]


class Body(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", protected_namespaces=())


def to_its_first_fault(biases: Any) -> Any:
    """Of a dict with a fault, nothing but that: it has no `fail_fast`."""
    if isinstance(biases, dict):
        for token, bias in biases.items():
            if type(bias) not in (int, float) or not -_MOST_BIAS <= bias <= _MOST_BIAS:
                return {token: bias}
    return biases


def one_of(shapes: str) -> WrapValidator:
    """Of a union: what it wants, in place of what each member has found wrong."""

    def validate(value: Any, member: ValidatorFunctionWrapHandler) -> Any:
        try:
            return member(value)
        except ValidationError:
            raise PydanticCustomError("one_of", "it must be {shapes}", {"shapes": shapes}) from None

    return WrapValidator(validate)


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding of events, which OpenAI adds unless told not to: there is none
    continuous_usage_stats: bool | None = None
    # For so long the generation goes on after its client has gone, who may come back: see kept_streams.py
    resume_grace_s: Annotated[Finite, Field(gt=0)] | None = None


class GenerationBody(Body):
    """What completions and chat completions share."""

    model: str
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES), WHOLE] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=_INT32_MAX), WHOLE] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    temperature: Annotated[Finite, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Finite, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=_INT32_MAX), WHOLE] | None = None
    min_p: Annotated[Finite, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**64 - 1), WHOLE] | None = None
    presence_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Finite, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[Finite, Field(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=20_000), BeforeValidator(to_its_first_fault)] | None = None
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1, max_length=300_000, fail_fast=True)] | None = None
    bad_words: Annotated[list[Annotated[str, Field(max_length=256)]], Field(max_length=1000, fail_fast=True)] | None = (
        None
    )

    stop: StopStrings = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=1000, fail_fast=True)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, le=_INT32_MAX), WHOLE] | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0), WHOLE] | None = None

    response_format: ResponseFormat = None  # what they may hold: router/grammar/asked.py
    structured_outputs: StructuredOutputs = None

    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=_INT32_MAX), WHOLE] | None = None
    timeout: Annotated[Finite, Field(gt=0)] | None = None  # seconds for the whole answer

    # These change nothing.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None  # but in responses
    service_tier: Annotated[str, Field(max_length=64)] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @property
    def resume_grace_s(self) -> float | None:
        return None if self.stream_options is None else self.stream_options.resume_grace_s

    @property
    def num_choices(self) -> int:
        """Of each prompt, as they are sent."""
        return self.n or 1

    @property
    def num_sequences(self) -> int:
        """Of each prompt, as they are generated."""
        return self.num_choices

    @property
    def asked_max_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def default_max_tokens(self) -> int | None:
        """None: as many as fit."""
        return None

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives beside the sampled token; None: no logprobs at all."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for the prompt's tokens."""
        return self.prompt_logprobs


class CompletionBody(GenerationBody):
    model_config = ConfigDict(json_schema_extra={"required": ["model", "prompt"]})

    prompt: Prompt = None
    echo: bool | None = None
    max_tokens: Annotated[int, Field(ge=0, le=_INT32_MAX), WHOLE] | None = (
        None  # 0: the prompt alone, echoed and scored
    )
    logprobs: Annotated[int, Field(ge=0), WHOLE] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES), WHOLE] | None = None  # 1, which some always send, is none

    @property
    def num_sequences(self) -> int:
        return max(self.num_choices, self.best_of or 1)

    @property
    def default_max_tokens(self) -> int:
        return 16  # OpenAI's

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((number for number in wanted if number is not None), default=None)


class FunctionCallBody(Body):
    name: str
    arguments: str  # JSON, as a model has written it


class ToolCallBody(Body):
    id: str
    type: Literal["function"] | None = None
    function: FunctionCallBody


class MessageBody(Body):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content = None
    refusal: str | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[ToolCallBody], Field(max_length=1000, fail_fast=True)] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None  # an older name for the same
    function_call: Nothing = None
    audio: Nothing = None


class FunctionBody(Body):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool | None = None


class ToolBody(Body):
    type: Literal["function"]
    function: FunctionBody


class FunctionName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


class AllowedToolList(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS, fail_fast=True)]


class AllowedTools(Body):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedToolList


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | Annotated[NamedTool | AllowedTools, Field(discriminator="type")],
    one_of('none, auto, required, or a function as {"type": "function", "function": {"name": ...}}'),
]


class ConversationBody(Body):
    """What the chat template is given."""

    messages: Annotated[list[MessageBody], Field(min_length=1, max_length=10_000, fail_fast=True)]
    tools: Annotated[list[ToolBody], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    reasoning_effort: Annotated[str, Field(max_length=64)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatBody(GenerationBody, ConversationBody):
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    echo: bool | None = None  # the message that the answer belongs to stands before it
    max_completion_tokens: Annotated[int, Field(ge=1, le=_INT32_MAX), WHOLE] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0), WHOLE] | None = None

    @property
    def asked_max_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

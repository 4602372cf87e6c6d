"""What the router answers, field by field. The document is made of these, and tests hold every answer to them."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class Reply(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


MAYBE: Any = Field(default=None)  # the key may be absent; if it is there, it has a value of its type
FinishReason = Literal["stop", "length", "tool_calls"]


class ErrorDetails(Reply):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(Reply):
    error: ErrorDetails


class PromptTokensDetails(Reply):
    cached_tokens: int


class CompletionTokensDetails(Reply):
    reasoning_tokens: int


class Usage(Reply):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails = MAYBE


class TokenLogprob(Reply):
    token: str
    logprob: float
    bytes: list[int]


class ScoredToken(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Reply):
    content: list[ScoredToken]
    refusal: None


class PromptLogprob(Reply):
    logprob: float
    rank: int
    decoded_token: str


class CompletionLogprobs(Reply):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Reply):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] = MAYBE
    prompt_token_ids: list[int] = MAYBE
    token_ids: list[int] = MAYBE


class Completion(Reply):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    service_tier: None
    system_fingerprint: None
    usage: Usage


class CompletionChunkChoice(Reply):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = MAYBE
    prompt_token_ids: list[int] = MAYBE
    token_ids: list[int] = MAYBE


class CompletionChunk(Reply):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    service_tier: None
    system_fingerprint: None
    choices: list[CompletionChunkChoice]
    usage: Usage | None = MAYBE


class CalledFunction(Reply):
    name: str
    arguments: str


class ToolCall(Reply):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Reply):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: str = MAYBE
    reasoning_content: str = MAYBE
    tool_calls: list[ToolCall] = MAYBE


class ChatChoice(Reply):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    token_ids: list[int] = MAYBE


class ChatCompletion(Reply):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    service_tier: None
    system_fingerprint: None
    usage: Usage
    prompt_token_ids: list[int] = MAYBE
    prompt_logprobs: list[dict[str, PromptLogprob] | None] = MAYBE


class FunctionPiece(Reply):
    name: str = MAYBE
    arguments: str


class ToolCallPiece(Reply):
    """`id`, `type` and the name come with the first piece of a call alone."""

    index: int
    id: str = MAYBE
    type: Literal["function"] = MAYBE
    function: FunctionPiece


class ChatDelta(Reply):
    role: Literal["assistant"] = MAYBE
    content: str = MAYBE
    reasoning: str = MAYBE
    reasoning_content: str = MAYBE
    tool_calls: list[ToolCallPiece] = MAYBE


class ChatChunkChoice(Reply):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None = MAYBE
    token_ids: list[int] = MAYBE


class ChatChunk(Reply):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    service_tier: None
    system_fingerprint: None
    choices: list[ChatChunkChoice]
    usage: Usage | None = MAYBE
    prompt_token_ids: list[int] = MAYBE


class ModelCard(Reply):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    parent: None
    max_model_len: int | None


class ModelList(Reply):
    object: Literal["list"]
    data: list[ModelCard]


class Tokens(Reply):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Reply):
    prompt: str


class Health(Reply):
    status: Literal["alive"]


class Readiness(Reply):
    status: Literal["ready", "not ready"]
    reason: str = MAYBE


class Version(Reply):
    version: str


class Load(Reply):
    """Generation requests that have not ended."""

    server_load: int

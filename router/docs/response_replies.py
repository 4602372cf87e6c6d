"""What /v1/responses answers. See `replies`."""

from typing import Annotated, Any, Literal

from pydantic import Field

from kvasir.router.docs.replies import MAYBE, ErrorDetails, Reply, ScoredToken

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(Reply):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ScoredToken]


class ReasoningText(Reply):
    type: Literal["reasoning_text"]
    text: str


class OutputMessage(Reply):
    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputText]


class OutputReasoning(Reply):
    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: list[Any]
    content: list[ReasoningText]


class OutputCall(Reply):
    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem = Annotated[OutputMessage | OutputReasoning | OutputCall, Field(discriminator="type")]


class InputTokensDetails(Reply):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(Reply):
    reasoning_tokens: int


class ResponseUsage(Reply):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFault(Reply):
    code: str
    message: str


class IncompleteDetails(Reply):
    reason: Literal["max_output_tokens"]


class ResponseReasoning(Reply):
    effort: str | None
    summary: str | None


class ResponseObject(Reply):
    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int = MAYBE
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False]
    error: ResponseFault | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ResponseReasoning
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    user: str | None


class Numbered(Reply):
    sequence_number: int


class ResponseEvent(Numbered):
    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: ResponseObject


class ItemEvent(Numbered):
    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class InItem(Numbered):
    output_index: int
    item_id: str


class PartEvent(InItem):
    type: Literal["response.content_part.added", "response.content_part.done"]
    content_index: int
    part: Annotated[OutputText | ReasoningText, Field(discriminator="type")]


class TextDelta(InItem):
    type: Literal["response.output_text.delta"]
    content_index: int
    delta: str
    logprobs: list[ScoredToken]


class TextDone(InItem):
    type: Literal["response.output_text.done"]
    content_index: int
    text: str
    logprobs: list[ScoredToken]


class ReasoningDelta(InItem):
    type: Literal["response.reasoning_text.delta"]
    content_index: int
    delta: str


class ReasoningDone(InItem):
    type: Literal["response.reasoning_text.done"]
    content_index: int
    text: str


class ArgumentsDelta(InItem):
    type: Literal["response.function_call_arguments.delta"]
    delta: str


class ArgumentsDone(InItem):
    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str


class ErrorEvent(Numbered):
    type: Literal["error"]
    code: str | None
    message: str
    param: str | None
    error: ErrorDetails


StreamedEvent = Annotated[
    ResponseEvent
    | ItemEvent
    | PartEvent
    | TextDelta
    | TextDone
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone
    | ErrorEvent,
    Field(discriminator="type"),
]


class InputItems(Reply):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(Reply):
    object: Literal["response.input_tokens"]
    input_tokens: int


class Deleted(Reply):
    id: str
    object: Literal["response.deleted"]
    deleted: Literal[True]

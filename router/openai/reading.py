"""How an answer is read: what the operator says of the model, what the client asks for, and what that comes to."""

from dataclasses import dataclass

from kvasir.common.errors import InvalidRequest
from kvasir.router.grammar.thoughts import behind_thoughts
from kvasir.router.openai.models import ChatBody
from kvasir.router.openai.prompts import Prompt
from kvasir.router.openai.structured import with_grammar
from kvasir.router.openai.tools import ToolPlan, tool_plan
from kvasir.router.text.answer_reader import AnswerReader
from kvasir.router.text.reasoning import REASONING_FORMATS, ReasoningReader, Start, start_of_answer
from kvasir.router.text.tools.formats import TOOL_FORMATS, detect_format
from kvasir.router.types import RoutedRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelHabits:
    """What of a model's text is not content. The defaults: all of it is."""

    tool_format: str | None = None  # a key of TOOL_FORMATS: calls on its own account are read
    reasoning_format: str | None = None  # a key of REASONING_FORMATS


def habits_of(
    template: str | None, *, tool_call_parser: str, reasoning_parser: str, enable_auto_tool_choice: bool
) -> ModelHabits:
    """`auto` is what the model's chat template shows, `none` is nothing."""
    tool_format = detect_format(template or "") if tool_call_parser == "auto" else tool_call_parser
    reasoning_format = reasoning_parser
    if reasoning_parser == "auto":
        reasoning_format = "qwen3" if "</think>" in (template or "") else "none"
    return ModelHabits(
        tool_format=tool_format if enable_auto_tool_choice and tool_format in TOOL_FORMATS else None,
        reasoning_format=reasoning_format if reasoning_format in REASONING_FORMATS else None,
    )


@dataclass(frozen=True, slots=True)
class Reading:
    """Of one request's answer."""

    plan: ToolPlan
    reasoning_format: str | None

    def constrained(self, request: RoutedRequest, prompt: Prompt) -> RoutedRequest:
        """With the grammar that the tools want, or the client; thoughts in front of it are free."""
        grammar = self.plan.grammar or request.sampling.grammar
        if grammar is None:
            return request
        grammar = behind_thoughts(grammar, self._start(prompt))
        return with_grammar(request, grammar)

    def new_reader(self, prompt: Prompt, choice_id: str) -> AnswerReader | None:
        """Of one choice; None: all of its text is content."""
        start, new_format = self._start(prompt), self.plan.new_format
        if start is None and new_format is None:
            return None
        tools = None
        if new_format is not None:
            tools = new_format()
            tools.answer_id = choice_id
        return AnswerReader(None if start is None else ReasoningReader(start), tools, one_call=self.plan.one_call)

    def _start(self, prompt: Prompt) -> Start | None:
        """None: this model's thoughts are not looked for."""
        if self.reasoning_format is None:
            return None
        thinks_first = REASONING_FORMATS[self.reasoning_format]
        return start_of_answer(prompt.text, thinks_first=thinks_first, begun=prompt.begun_answer)

    @property
    def markers(self) -> frozenset[str]:
        """Special tokens that the reader wants to see."""
        markers = set() if self.plan.new_format is None else set(self.plan.new_format().markers)
        return frozenset(markers if self.reasoning_format is None else markers | {"<think>", "</think>"})


def reading_of(body: ChatBody, habits: ModelHabits) -> Reading:
    """A `response_format` is for answers that are no calls: it does not hold where a call is wanted."""
    plan = tool_plan(body, habits.tool_format)
    if plan.grammar is not None and body.structured_outputs is not None:
        message = "'structured_outputs' and a 'tool_choice' that wants a call exclude each other"
        raise InvalidRequest(message, "structured_outputs", "invalid_value")
    return Reading(plan, habits.reasoning_format)

"""What the choices of one chat say to the client: words and tool calls, in deltas or as whole messages."""

import uuid
from dataclasses import dataclass, field

from twostroke.frontend.tools.events import Arguments, CallBegun, Content, ToolEvent, ToolParser
from twostroke.frontend.tools.use import ToolUse
from twostroke.protocol.openai_tools import FunctionCall, FunctionDelta, ToolCall, ToolCallDelta
from twostroke.protocol.responses import FinishReason

TOOL_CALLS = "tool_calls"
"""Why an answer ended that calls tools, instead of `stop`."""


@dataclass(slots=True)
class Spoken:
    """Words and calls of a piece of an answer, or of all of it; `finish_reason` is set at its end."""

    content: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def empty(self) -> bool:
        """Whether there is nothing to tell a client."""
        return not self.content and not self.calls and self.finish_reason is None

    def whole_calls(self) -> list[ToolCall]:
        """The calls, of a whole answer."""
        return [
            ToolCall(call.id or "", "function", FunctionCall(call.function.name or "", call.function.arguments or ""))
            for call in self.calls
        ]


class SpokenAnswers:
    """Reads the answers to one request.

    Args:
        tools: How the request uses tools; without any, all is words.
    """

    def __init__(self, tools: ToolUse | None) -> None:
        self._tools = tools
        self._answers: dict[int, _SpokenAnswer] = {}

    @property
    def guarded(self) -> bool:
        """Whether text may turn out to be a call, so that all of it must go through `add`."""
        return self._tools is not None

    def add(self, index: int, text: str, finish_reason: FinishReason | None) -> Spoken:
        """What the next piece of choice `index` says; the last one, with a finish reason, also what was held back."""
        if self._tools is None:
            return Spoken(text, finish_reason=finish_reason)
        answer = self._answers.get(index)
        if answer is None:
            answer = self._answers[index] = _SpokenAnswer(self._tools.parser(), several=self._tools.several)
        return answer.add(text, finish_reason)


class _SpokenAnswer:
    """One answer; `several` says whether all of its calls count, or the first alone."""

    def __init__(self, parser: ToolParser, *, several: bool) -> None:
        self._parser = parser
        self._several = several
        self._called = False

    def add(self, text: str, finish_reason: FinishReason | None) -> Spoken:
        spoken = Spoken(finish_reason=finish_reason)
        events = self._parser.push(text)
        if finish_reason is not None:
            events += self._parser.finish()
        for event in events:
            self._tell(event, spoken)
        if self._called and finish_reason is FinishReason.STOP:
            spoken.finish_reason = TOOL_CALLS
        return spoken

    def _tell(self, event: ToolEvent, spoken: Spoken) -> None:
        match event:
            case Content(text):
                spoken.content += text
            case CallBegun(index, name) if index == 0 or self._several:
                self._called = True
                function = FunctionDelta(name=name, arguments="")
                spoken.calls.append(ToolCallDelta(index, function, id=f"call_{uuid.uuid4().hex}", type="function"))
            case Arguments(index, text) if index == 0 or self._several:
                newest = spoken.calls[-1] if spoken.calls else None
                if newest is not None and newest.index == index:
                    newest.function.arguments = (newest.function.arguments or "") + text
                else:
                    spoken.calls.append(ToolCallDelta(index, FunctionDelta(arguments=text)))

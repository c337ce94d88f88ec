"""The events of an OpenAI stream: bytes in, what matters of each out. Pure."""

from dataclasses import dataclass

import msgspec


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: msgspec.Raw | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None

    @property
    def has_output(self) -> bool:
        delta = self.delta or _Delta()
        return bool(self.text or delta.content or delta.reasoning_content or delta.tool_calls)


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _ErrorBody(msgspec.Struct):
    type: str | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _ErrorBody | None = None


_DECODER = msgspec.json.Decoder(_Event)
DONE = b"[DONE]"


@dataclass(slots=True)
class StreamState:
    """What a stream has told so far.

    Attributes:
        outputs: Events that carried output.
        prompt_tokens: From `usage`, 0 before it.
        output_tokens: Likewise.
        done: `[DONE]` came.
        error: Kind of an error event or of an event that cannot be read.
    """

    outputs: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    done: bool = False
    error: str | None = None
    _rest: bytes = b""

    def push(self, data: bytes) -> int:
        """Read the next bytes; how many events with output they complete."""
        before = self.outputs
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._read(line[5:].strip())
        return self.outputs - before

    def _read(self, event: bytes) -> None:
        if event == DONE:
            self.done = True
            return
        try:
            decoded = _DECODER.decode(event)
        except msgspec.DecodeError:
            self.error = self.error or "malformed event"
            return
        if decoded.error is not None:
            self.error = f"stream error {decoded.error.type or ''}".strip()
        self.outputs += any(choice.has_output for choice in decoded.choices)
        if decoded.usage is not None:
            self.prompt_tokens = decoded.usage.prompt_tokens
            self.output_tokens = decoded.usage.completion_tokens

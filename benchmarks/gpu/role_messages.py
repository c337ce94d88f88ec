"""What the processes of `interference` say; requests go to them as `GenerationRequest`."""

import msgspec

from twostroke.protocol.responses import SequenceOutput


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The engine serves."""


class Made(msgspec.Struct, frozen=True, tag=True):
    """What one step made, and when it had ended."""

    at: float
    outputs: list[SequenceOutput]


Answer = Ready | Made

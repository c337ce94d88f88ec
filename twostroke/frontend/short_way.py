"""The short way of tokens from the executor to the client, which most tokens of most streams go.

It is open, for the outputs that wait together, where all of this holds; else they become a `Piece` as all others do:

* the stream has begun with a piece, and its client takes bytes at once (`Exchange.writable`);
* they are not the last, and hold nothing but tokens (`GenerationResult.take_tokens`);
* the answer has one choice, and its text is all that is told of it: no logprobs, ids, stop strings, echo or tools, no
  counts in each event (`OutputText.only_text`, `AnswerWriter.around_text`).

Both ways write the same bytes. This one takes half the calls.
"""

import msgspec

from twostroke.executor.result import GenerationResult
from twostroke.frontend.exchange import Exchange
from twostroke.frontend.metrics import SequenceTimer
from twostroke.frontend.output import OutputText
from twostroke.protocol.tokens import unpack_tokens

_ENCODER = msgspec.json.Encoder()


class ShortWay:
    """The short way of one stream.

    Args:
        result: Where the tokens wait.
        output: Decodes and counts them.
        timer: Measures them.
        exchange: Writes them.
        around: What stands before and after their text in an event.
    """

    def __init__(
        self,
        result: GenerationResult,
        output: OutputText,
        timer: SequenceTimer,
        exchange: Exchange,
        around: tuple[bytes, bytes],
    ) -> None:
        self._result = result
        self._output = output
        self._decode = output.detokenizer.push
        self._timer = timer
        self._exchange = exchange
        self._before, self._after = around

    def take(self) -> bool:
        """Write what waits; False, and it goes on waiting, if the way is not open."""
        if not self._exchange.writable:
            return False
        buffer = self._result.take_tokens()
        if not buffer:
            return False
        token_ids = unpack_tokens(buffer)
        self._timer.tokens(len(token_ids), None)
        self._output.token_count += len(token_ids)
        text = self._decode(token_ids)
        if text:
            self._exchange.write_event(self._before + _ENCODER.encode(text) + self._after)
        return True

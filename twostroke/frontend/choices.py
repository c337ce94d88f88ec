"""The choices of one answer while they are made: each a sequence of its own, told to the client as pieces come."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol, Self

from twostroke.executor.base import GenerationExecutor
from twostroke.executor.result import GenerationResult
from twostroke.frontend.exchange import Exchange
from twostroke.frontend.intake import Submission
from twostroke.frontend.metrics import SequenceTimer
from twostroke.frontend.output import OutputText, Piece
from twostroke.frontend.short_way import ShortWay
from twostroke.frontend.tokenizer import TextModel
from twostroke.protocol.openai_answers import Usage
from twostroke.protocol.tokens import TOKEN_BYTES, token_count


class Choice:
    """One sequence's result, read as pieces; outputs that wait together become one piece.

    Args:
        index: Its number in the answer.
        result: What the executor makes.
        submission: What was asked for.
        executor: Told when a stop string has ended the sequence.
        text: Decodes.
        timer: Measures.
    """

    def __init__(
        self,
        index: int,
        result: GenerationResult,
        submission: Submission,
        *,
        executor: GenerationExecutor,
        text: TextModel,
        timer: SequenceTimer,
    ) -> None:
        self.index = index
        # A prompt counts once, however many choices are made of it.
        self.prompt_tokens = 0 if result.key.index else token_count(result.request.prompt_ids)
        self.output = OutputText(text, submission.outputs[index])
        self._result = result
        self._executor = executor
        self._timer = timer

    def subscribe(self, on_wake: Callable[[], None]) -> None:
        """Have `on_wake` called whenever there may be a new piece; only at the end where nobody reads before that."""
        self._result.subscribe(on_wake, at_end=self._result.request.tell_every > 1)

    def short_way(self, exchange: Exchange, around: tuple[bytes, bytes]) -> ShortWay:
        """The short way of its tokens to `exchange`; of use if text is all that is asked for."""
        return ShortWay(self._result, self.output, self._timer, exchange, around)

    def unsubscribe(self) -> None:
        """Call nobody any more."""
        self._result.unsubscribe()

    def next_piece(self) -> Piece | None:
        """What has come since the piece before; None if there is nothing to tell yet. A finish reason is in the last.

        Raises:
            TwostrokeError: The sequence failed.
        """
        outputs = self._result.take_waiting()
        if not outputs:
            return None
        size = len(outputs[0].token_ids) if len(outputs) == 1 else sum([len(output.token_ids) for output in outputs])
        self._timer.tokens(size // TOKEN_BYTES, self._result.began_s)
        piece = self.output.add(outputs)
        if self.output.stopped_by_string:
            # The engine does not know stop strings; nothing it still makes is of use.
            self._executor.complete_request(self._result.key.client_id, self._result.key.index)
        if piece.finish_reason is not None:
            self._timer.prompt(self.prompt_tokens, min(self.output.cached_tokens, self.prompt_tokens))
        elif not piece.text:
            return None
        return piece


Batch = list[tuple[Choice, Piece]]
"""Pieces that came together."""


class Take(Protocol):
    """What is done with pieces as they come."""

    def __call__(self, batch: Batch, *, last: bool) -> bool:
        """Take a batch, the last one or not; False leaves it to the reader."""
        ...


class Pieces:
    """The pieces of all choices of one answer as they come, each choice's in order. A context.

        await next_batch() -> everything that came meanwhile      (and so on, until `unfinished` is 0)

    While the reader awaits, batches are taken as they come without resuming it, which saves a change of task each.

    Args:
        choices: All of them.
        take: Called on the loop with a batch that comes while the reader awaits.
        short_way: Tried before that, if there is one.
    """

    def __init__(self, choices: Sequence[Choice], take: Take, short_way: ShortWay | None = None) -> None:
        self._choices = choices
        self._open = list(choices)
        self._take = take
        self._short_way = short_way
        self._waiter: asyncio.Future[None] | None = None
        self._left: Batch = []
        self._scheduled = False

    def __enter__(self) -> Self:
        on_wake = self._advance if len(self._choices) == 1 else self._wake
        for choice in self._choices:
            choice.subscribe(on_wake)
        return self

    def __exit__(self, *_: object) -> None:
        for choice in self._choices:  # which would keep each other in memory until the garbage is collected
            choice.unsubscribe()

    @property
    def unfinished(self) -> int:
        """Choices whose last piece has not come."""
        return len(self._open)

    async def next_batch(self) -> Batch:
        """The next pieces that were not taken as they came.

        Raises:
            TwostrokeError: A choice failed; the pieces of the others are of no use then.
        """
        batch = self._poll()
        if not batch:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
            batch, self._left = self._left, []
        return batch

    def _poll(self) -> Batch:
        if len(self._open) == 1:  # nearly always
            only = self._open[0]
            piece = only.next_piece()
            batch = [] if piece is None else [(only, piece)]
        else:
            batch = [(choice, piece) for choice in self._open if (piece := choice.next_piece()) is not None]
        for choice, piece in batch:
            if piece.finish_reason is not None:
                self._open.remove(choice)
        return batch

    def _wake(self) -> None:
        """One of several choices has something: the others are about to be woken too."""
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._advance)

    def _advance(self) -> None:
        self._scheduled = False
        waiter, self._waiter = self._waiter, None  # what the batch itself causes must not come in here again
        if waiter is None or waiter.done():
            return  # the reader is busy, and looks again before it waits
        try:
            if self._short_way is not None and self._short_way.take():
                self._waiter = waiter
                return
            batch = self._poll()
            if batch and not self._take(batch, last=not self._open):
                self._left = batch
                waiter.set_result(None)
            else:
                self._waiter = waiter
        except Exception as error:  # noqa: BLE001 - the reader's to handle
            waiter.set_exception(error)


def usage_of(choices: Sequence[Choice]) -> Usage:
    """The counts so far, of all choices together."""
    prompt = completion = cached = 0
    for choice in choices:
        prompt += choice.prompt_tokens
        completion += choice.output.token_count
        cached += min(choice.output.cached_tokens, choice.prompt_tokens)
    return Usage.count(prompt, completion, cached)

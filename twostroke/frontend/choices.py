"""The choices of one answer while they are made: each a sequence of its own, told to the client as pieces come."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from twostroke.executor.base import GenerationExecutor
from twostroke.executor.result import GenerationResult
from twostroke.frontend.intake import Submission
from twostroke.frontend.metrics import SequenceTimer
from twostroke.frontend.output import OutputText, Piece
from twostroke.frontend.tokenizer import TextModel
from twostroke.protocol.openai_answers import Usage
from twostroke.protocol.tokens import token_count


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

    async def next_piece(self) -> Piece:
        """Wait for the next piece; the one with a finish reason is the last.

        Raises:
            TwostrokeError: The sequence failed.
        """
        while True:
            outputs = await self._result.next_outputs()
            self._timer.tokens(sum(token_count(output.token_ids) for output in outputs))
            piece = self.output.add(outputs)
            if self.output.stopped_by_string:
                # The engine does not know stop strings; nothing it still makes is of use.
                self._executor.complete_request(self._result.key.client_id, self._result.key.index)
            if piece.finish_reason is not None:
                self._timer.prompt(self.prompt_tokens, min(self.output.cached_tokens, self.prompt_tokens))
            if not piece.empty:
                return piece


async def batches(choices: Sequence[Choice]) -> AsyncIterator[list[tuple[Choice, Piece]]]:
    """The pieces of all choices, each choice's in order; those that come together make one batch.

    Raises:
        TwostrokeError: A choice failed; the pieces of the others are of no use then.
    """
    if len(choices) == 1:
        choice = choices[0]
        while True:
            piece = await choice.next_piece()
            yield [(choice, piece)]
            if piece.finish_reason is not None:
                return
    loop = asyncio.get_running_loop()
    reading = {loop.create_task(choice.next_piece()): choice for choice in choices}
    try:
        while reading:
            done, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
            failures = [failure for task in done if (failure := task.exception()) is not None]
            if failures:
                raise failures[0]
            batch = sorted(((reading.pop(task), task.result()) for task in done), key=lambda pair: pair[0].index)
            yield batch
            for choice, piece in batch:
                if piece.finish_reason is None:
                    reading[loop.create_task(choice.next_piece())] = choice
    finally:
        for task in reading:
            task.cancel()


def usage_of(choices: Sequence[Choice]) -> Usage:
    """The counts so far, of all choices together."""
    return Usage.count(
        prompt=sum(choice.prompt_tokens for choice in choices),
        completion=sum(choice.output.token_count for choice in choices),
        cached=sum(min(choice.output.cached_tokens, choice.prompt_tokens) for choice in choices),
    )

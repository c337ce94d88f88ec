"""The half of reading a request that the generating endpoints share: from fields and a prompt to a submission."""

from collections.abc import Sequence

import msgspec

from twostroke.executor.base import GenerationExecutor, HealthState, ServedModel
from twostroke.frontend.echo import make_echo
from twostroke.frontend.output import OutputOptions
from twostroke.frontend.request_fields import (
    OutputLimit,
    StreamUsage,
    check_model,
    check_prompt,
    choices_of,
    output_limit,
    refuse_unserved,
    stop_strings,
    stream_usage,
)
from twostroke.frontend.sampling_fields import WantedLogprobs, check_prompt_logprobs, read_sampling, with_max_tokens
from twostroke.frontend.tokenizer import TextModel
from twostroke.frontend.tools.use import ToolUse
from twostroke.protocol.constraint import Constraint
from twostroke.protocol.errors import OverloadedError
from twostroke.protocol.ids import SequenceKey
from twostroke.protocol.openai import SamplingFields
from twostroke.protocol.requests import GenerationRequest
from twostroke.protocol.sampling import SamplingParams
from twostroke.protocol.tokens import pack_tokens

TELL_EVERY = 64
"""Tokens a message of an answer that nobody reads before its end."""


class Submission(msgspec.Struct, frozen=True):
    """A request that was read and found right.

    Attributes:
        requests: For the executor, one a prompt; each makes as many choices of the answer as it has sequences.
        outputs: How the output of each choice becomes text; those of one prompt stand together.
        model: Served name.
        stream: Whether the client wants events.
        usage: When a stream carries the token counts.
        tools: How a chat uses tools; None if it uses none.
    """

    requests: tuple[GenerationRequest, ...]
    outputs: tuple[OutputOptions, ...]
    model: str
    stream: bool
    usage: StreamUsage
    tools: ToolUse | None = None


class Prompt(msgspec.Struct, frozen=True):
    """A tokenized prompt.

    Attributes:
        token_ids: Its tokens.
        field: The request field that it came from.
        text: What was tokenized; None if token ids were given.
    """

    token_ids: list[int]
    field: str
    text: str | None = None


def served_model(executor: GenerationExecutor) -> ServedModel:
    """The model behind `executor`, without ever waiting for it.

    Raises:
        OverloadedError: It is still loading.
        EngineDeadError: It never became ready.
    """
    health = executor.check_health()
    if health.state is HealthState.STARTING:
        raise OverloadedError(health.reason or "the model is still loading; try again soon")
    return executor.model


class Intake:
    """Checks requests against the served model and makes submissions of them.

    Args:
        executor: Knows the model and draws client ids.
        text: Knows the sampling defaults, and tokenizes bad words.
        max_n: Choices of one prompt at most.
    """

    def __init__(self, executor: GenerationExecutor, text: TextModel, max_n: int) -> None:
        self._executor = executor
        self._max_n = max_n
        self._text = text

    def check(self, fields: SamplingFields) -> ServedModel:
        """What can be refused before the prompt is tokenized; returns the model that is asked for.

        Raises:
            InvalidRequestError: A field is wrong, or asks for something that is not served.
            ApiError: It asks for another model.
            OverloadedError: The model is still loading.
            EngineDeadError: It never became ready.
        """
        model = served_model(self._executor)
        check_model(fields.model, model)
        refuse_unserved(fields)
        choices_of(fields, self._max_n)
        stop_strings(fields.stop)
        stream_usage(fields)
        check_prompt_logprobs(fields)
        return model

    def submission(
        self,
        fields: SamplingFields,
        model: ServedModel,
        prompts: Sequence[Prompt],
        limit: OutputLimit,
        *,
        wanted: WantedLogprobs,
        deadline_s: float,
        echo: bool = False,
        constraint: Constraint | None = None,
        tools: ToolUse | None = None,
    ) -> Submission:
        """The submission of a checked request.

        Args:
            fields: The request.
            model: What `check` returned.
            prompts: Its prompts, at least one.
            limit: How long each output may be.
            wanted: Logprobs to report.
            deadline_s: The executor's time for it.
            echo: The text of each answer begins with its prompt.
            constraint: What each output must look like.
            tools: How a chat uses tools.

        Raises:
            InvalidRequestError: A prompt is empty or does not fit, or a value is outside its range.
        """
        sampling: SamplingParams | None = None
        n = choices_of(fields, self._max_n)
        # A stop string ends a sequence here, and the worker should make nothing after it.
        tell_every = 1 if fields.stream or fields.stop else TELL_EVERY
        requests: list[GenerationRequest] = []
        outputs: list[OutputOptions] = []
        for prompt in prompts:
            check_prompt(prompt.token_ids, model, prompt.field)
            max_tokens = output_limit(limit, len(prompt.token_ids), model, prompt.field)
            # An engine always makes a token; where none is asked for, it is not shown.
            room = max_tokens or 1
            if sampling is None:
                sampling = read_sampling(fields, wanted, model, self._text, room)
            elif sampling.max_tokens != room:
                sampling = with_max_tokens(sampling, room)
            requests.append(
                GenerationRequest(
                    key=SequenceKey(self._executor.draw_client_id()),
                    prompt_ids=pack_tokens(prompt.token_ids),
                    sampling=sampling,
                    constraint=constraint,
                    cache_salt=fields.cache_salt or "",
                    deadline_s=deadline_s,
                    n=n,
                    tell_every=tell_every,
                )
            )
            options = self._output_options(fields, prompt, wanted, echo=echo, only_echo=max_tokens == 0)
            outputs += [options] * n
        return Submission(
            requests=tuple(requests),
            outputs=tuple(outputs),
            model=model.name,
            stream=bool(fields.stream),
            usage=stream_usage(fields),
            tools=tools,
        )

    def _output_options(
        self, fields: SamplingFields, prompt: Prompt, wanted: WantedLogprobs, *, echo: bool, only_echo: bool
    ) -> OutputOptions:
        begin = None
        if echo:
            begin = make_echo(self._text, prompt.token_ids, prompt.text, with_offsets=wanted.echo is not None)
        return OutputOptions(
            stop=stop_strings(fields.stop),
            min_tokens=fields.min_tokens or 0,
            include_stop=bool(fields.include_stop_str_in_output),
            keep_ids=bool(fields.return_token_ids),
            logprobs=wanted,
            prompt_ids=prompt.token_ids,
            echo=begin,
            only_echo=only_echo,
        )

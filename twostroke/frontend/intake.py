"""The half of reading a request that the generating endpoints share: from fields and a prompt to a submission."""

from collections.abc import Sequence
from dataclasses import dataclass

from twostroke.executor.base import GenerationExecutor, HealthState, ServedModel
from twostroke.frontend.request_fields import (
    OutputLimit,
    StreamUsage,
    check_model,
    check_prompt,
    output_limit,
    refuse_unserved,
    sampling_params,
    seed_of,
    stop_strings,
    stream_usage,
)
from twostroke.frontend.tokenizer_files import SamplingDefaults
from twostroke.protocol.errors import OverloadedError
from twostroke.protocol.ids import SequenceKey
from twostroke.protocol.openai import SamplingFields
from twostroke.protocol.requests import GenerationRequest
from twostroke.protocol.tokens import pack_tokens


@dataclass(frozen=True, slots=True)
class Submission:
    """A request that was read and found right.

    Attributes:
        requests: For the executor, one a choice of the answer; each has a prompt of its own.
        model: Served name.
        stop: Stop strings.
        stream: Whether the client wants events.
        usage: When a stream carries the token counts.
        return_token_ids: Whether the answer carries the ids of the output tokens.
    """

    requests: tuple[GenerationRequest, ...]
    model: str
    stop: tuple[str, ...]
    stream: bool
    usage: StreamUsage
    return_token_ids: bool


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenized prompt.

    Attributes:
        token_ids: Its tokens.
        field: The request field that it came from.
    """

    token_ids: list[int]
    field: str


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
        defaults: The model's sampling defaults.
    """

    def __init__(self, executor: GenerationExecutor, defaults: SamplingDefaults) -> None:
        self._executor = executor
        self._defaults = defaults

    def check(self, fields: SamplingFields) -> None:
        """What can be refused before the prompt is tokenized.

        Raises:
            InvalidRequestError: A field is wrong, or asks for something that is not served.
            ApiError: It asks for another model.
            OverloadedError: The model is still loading.
            EngineDeadError: It never became ready.
        """
        check_model(fields.model, served_model(self._executor))
        refuse_unserved(fields)
        stop_strings(fields.stop)
        stream_usage(fields)

    def submission(
        self,
        fields: SamplingFields,
        prompts: Sequence[Prompt],
        limit: OutputLimit,
        *,
        logprobs: int | None,
        deadline_s: float,
    ) -> Submission:
        """The submission of a checked request.

        Args:
            fields: The request.
            prompts: Its prompts, at least one.
            limit: How long each output may be.
            logprobs: Alternatives to report at each token; None for no logprobs.
            deadline_s: The executor's time for it.

        Raises:
            InvalidRequestError: A prompt is empty or does not fit, or a value is outside its range.
        """
        model = served_model(self._executor)
        seed = seed_of(fields)
        requests: list[GenerationRequest] = []
        for prompt in prompts:
            check_prompt(prompt.token_ids, model, prompt.field)
            max_tokens = output_limit(limit, len(prompt.token_ids), model, prompt.field)
            requests.append(
                GenerationRequest(
                    key=SequenceKey(self._executor.draw_client_id()),
                    prompt_ids=pack_tokens(prompt.token_ids),
                    sampling=sampling_params(fields, max_tokens, logprobs, model, defaults=self._defaults, seed=seed),
                    cache_salt=fields.cache_salt or "",
                    deadline_s=deadline_s,
                )
            )
        return Submission(
            requests=tuple(requests),
            model=model.name,
            stop=stop_strings(fields.stop),
            stream=bool(fields.stream),
            usage=stream_usage(fields),
            return_token_ids=bool(fields.return_token_ids),
        )

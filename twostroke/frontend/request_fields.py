"""Reads the fields of an OpenAI request; every refusal is an error that names its field."""

import enum
import operator
import re
import secrets
from typing import TypeVar

import msgspec

from twostroke.executor.base import ServedModel
from twostroke.frontend.errors import ApiError, Kind
from twostroke.protocol.errors import InvalidRequestError
from twostroke.protocol.openai import INTERNAL, NEVER_SERVED, NULL, REFUSED, NotServed, SamplingFields
from twostroke.protocol.sampling import MAX_SEED

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 512

_MISSING = re.compile(r"missing required field `(.+?)`")
_PATH = re.compile(r" - at `\$\.?(.*)`$")

_not_served = operator.attrgetter(*NotServed.__struct_fields__)
_ALL_NULL = (NULL,) * len(NotServed.__struct_fields__)

B = TypeVar("B", bound=msgspec.Struct)


class StreamUsage(enum.Enum):
    """When a stream carries the token counts."""

    NEVER = "never"
    AT_THE_END = "at the end"
    ALWAYS = "with every chunk"


class OutputLimit(msgspec.Struct, frozen=True):
    """How long the output may be.

    Attributes:
        given: What the client asks for, if it does.
        field: The field that it used.
        default: What it gets otherwise; None for all that the context leaves.
        least: What it may ask for at least; 0 where the answer holds something else.
    """

    given: int | None
    field: str
    default: int | None
    least: int = 1


def decode_body(decoder: msgspec.json.Decoder[B], body: bytes) -> B:
    """The request in `body`.

    Raises:
        InvalidRequestError: It is no JSON, or a field is missing or has the wrong type; `param` names it.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        message = str(error)
        missing, path = _MISSING.search(message), _PATH.search(message)
        parts = [path[1].removesuffix("[...]") if path else "", missing[1] if missing else ""]
        param = ".".join(part for part in parts if part) or None
        problem = _PATH.sub("", message)
        raise InvalidRequestError(f"{param}: {problem}" if param else problem, param) from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from None


def refuse_unserved(body: NotServed) -> None:
    """Refuse fields that would change the answer but are not served.

    Raises:
        InvalidRequestError: A field of `REFUSED` asks for something, or a field of `INTERNAL` is there at all.
    """
    # Nearly every request has none of them: then one look in C is all.
    if _not_served(body) == _ALL_NULL:
        return
    for name in NotServed.__struct_fields__:
        raw: msgspec.Raw = getattr(body, name)
        if raw is NULL or bytes(raw) == b"null":
            continue
        if name in INTERNAL:
            raise InvalidRequestError(f"{name} belongs to the cluster's own protocol; leave it out", name)
        if msgspec.json.decode(raw) not in REFUSED[name]:
            reason = NEVER_SERVED.get(name, "not supported yet; leave it out")
            raise InvalidRequestError(f"{name} is {reason}", name)


def check_model(given: str | None, model: ServedModel) -> None:
    """Refuse a model that is not served (404)."""
    if given is not None and given != model.name:
        message = f"the model `{given}` does not exist here; the served model is `{model.name}`"
        raise ApiError(Kind.NOT_FOUND, message, "model", "model_not_found")


def check_prompt(token_ids: list[int], model: ServedModel, field: str) -> None:
    """Refuse an empty prompt, and token ids outside the vocabulary."""
    if not token_ids:
        raise InvalidRequestError(f"{field} must hold at least one token, not 0", field)
    check_token_ids(token_ids, model, field)


def check_token_ids(token_ids: list[int], model: ServedModel, field: str) -> None:
    """Refuse token ids outside the vocabulary."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < model.vocab_size):
        wrong = next(token for token in token_ids if not 0 <= token < model.vocab_size)
        message = f"{field}: token id {wrong} is not in the vocabulary of 0 to {model.vocab_size - 1}"
        raise InvalidRequestError(message, field)


def stop_strings(given: str | list[str] | None) -> tuple[str, ...]:
    """The stop strings, whatever form they were given in."""
    stops = (given,) if isinstance(given, str) else tuple(given or ())
    if len(stops) > MAX_STOP_STRINGS:
        raise InvalidRequestError(f"stop must hold at most {MAX_STOP_STRINGS} texts, not {len(stops)}", "stop")
    for stop in stops:
        if not 1 <= len(stop) <= MAX_STOP_CHARS:
            message = f"stop must hold texts of 1 to {MAX_STOP_CHARS} characters, not {len(stop)}"
            raise InvalidRequestError(message, "stop")
    return stops


def stream_usage(body: SamplingFields) -> StreamUsage:
    """When a stream carries the token counts.

    Raises:
        InvalidRequestError: `stream_options` without a stream.
    """
    options = body.stream_options
    if options is None:
        return StreamUsage.NEVER
    if not body.stream:
        raise InvalidRequestError("stream_options needs stream to be true", "stream_options")
    if not options.include_usage:
        return StreamUsage.NEVER
    return StreamUsage.ALWAYS if options.continuous_usage_stats else StreamUsage.AT_THE_END


def choices_of(body: SamplingFields, most: int) -> int:
    """How many choices to make of each prompt.

    Raises:
        InvalidRequestError: None, or more than `most`.
    """
    n = 1 if body.n is None else body.n
    if not 1 <= n <= most:
        raise InvalidRequestError(f"n must be from 1 to {most}, not {n}", "n")
    return n


def seed_of(body: SamplingFields) -> int:
    """The request's seed, or a drawn one, so that a retry repeats the same tokens."""
    # Clients send any integer; equal seeds stay equal.
    return secrets.randbelow(MAX_SEED + 1) if body.seed is None else body.seed & MAX_SEED


def output_limit(limit: OutputLimit, prompt_tokens: int, model: ServedModel, prompt_field: str) -> int:
    """How many tokens the output may have.

    Raises:
        InvalidRequestError: The prompt, or the prompt and the output asked for, do not fit the context.
    """
    room = model.max_model_len - prompt_tokens
    if room < 1:
        message = (
            f"the prompt of {prompt_tokens} tokens leaves no room for output: "
            f"the model's context holds {model.max_model_len} tokens in all; shorten the prompt"
        )
        raise InvalidRequestError(message, prompt_field)
    if limit.given is None:
        return room if limit.default is None else min(limit.default, room)
    if limit.given > room:
        message = (
            f"{limit.field} of {limit.given} and the prompt of {prompt_tokens} tokens do not fit: "
            f"the model's context holds {model.max_model_len} tokens in all; "
            f"ask for at most {room} or shorten the prompt"
        )
        raise InvalidRequestError(message, limit.field)
    if limit.given < limit.least:
        raise InvalidRequestError(f"{limit.field} must be at least {limit.least}, not {limit.given}", limit.field)
    return limit.given

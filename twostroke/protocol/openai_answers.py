"""The OpenAI schema: what clients get back from `/v1/...`, whole or in chunks; errors too."""

import msgspec

from twostroke.protocol.openai_tools import ToolCall, ToolCallDelta


class PromptTokensDetails(msgspec.Struct, frozen=True):
    """How many prompt tokens came from the prefix cache."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Token counts of one request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def count(cls, prompt: int, completion: int, cached: int) -> "Usage":
        """Counts of a request; `cached` never exceeds the prompt."""
        return cls(prompt, completion, prompt + completion, PromptTokensDetails(min(cached, prompt)))


class CompletionLogprobs(msgspec.Struct):
    """Logprobs in the form of `/v1/completions`: parallel lists, one entry a token.

    Attributes:
        tokens: Text of each token.
        token_logprobs: Its logprob; null for the first token of an echoed prompt, before which nothing comes.
        top_logprobs: The likeliest tokens and their logprobs; likewise.
        text_offset: Where the token begins in the text, in characters.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(msgspec.Struct):
    """A token at one position of a prompt; its rank is 1 if no token was likelier there."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobsField = list[dict[str, PromptLogprob] | None] | msgspec.UnsetType
"""As vLLM gives them: by token id, the prompt's own token and the likeliest ones; null for the first token."""


class CompletionChoice(msgspec.Struct):
    """One text, or one piece of it. `token_ids` and `prompt_logprobs` stand in it if the request asked for them."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptLogprobsField = msgspec.UNSET


class Completion(msgspec.Struct):
    """Answer of `/v1/completions`."""

    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class TopLogprob(msgspec.Struct):
    """A likely token: text, logprob, and its bytes, since a token may hold part of a character only."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    """A chosen token with its likeliest alternatives."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Logprobs in the form of `/v1/chat/completions`."""

    content: list[TokenLogprob]
    refusal: None = None


class AssistantMessage(msgspec.Struct):
    """What the model said and called; without words beside its calls, `content` is null."""

    role: str
    content: str | None
    refusal: None = None
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct):
    """One answer of a chat. `token_ids` stands in it if the request asked for them."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct):
    """Answer of `/v1/chat/completions`, not streamed. `prompt_logprobs` stands in it if the request asked for them."""

    id: str
    object: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobsField = msgspec.UNSET


class Delta(msgspec.Struct, omit_defaults=True):
    """What a chunk adds to the message."""

    role: str | None = None
    content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChunkChoice(msgspec.Struct):
    """One piece of one answer. `token_ids` stands in it if the request asked for them."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class Model(msgspec.Struct):
    """An entry of `/v1/models`."""

    id: str
    object: str
    created: int
    owned_by: str
    max_model_len: int


class ModelList(msgspec.Struct):
    """Answer of `/v1/models`."""

    object: str
    data: list[Model]


class HealthReport(msgspec.Struct):
    """Answer of `/health` and `/ready`: a state, and for people the reason."""

    state: str
    reason: str


class ErrorObject(msgspec.Struct, frozen=True):
    """What went wrong, in OpenAI's form.

    Attributes:
        message: For people.
        type: Coarse kind (`invalid_request_error`, `server_error`, ...).
        param: The request field at fault, if one is.
        code: Fine kind for programs, if there is one.
    """

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of every error, and the data of a stream's error event."""

    error: ErrorObject


class Tokenized(msgspec.Struct):
    """Answer of `/tokenize`.

    Attributes:
        count: Number of tokens.
        max_model_len: How many the model's context holds.
        tokens: Their ids.
        token_strs: The vocabulary's spelling of each, if asked for.
    """

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct):
    """Answer of `/detokenize`: the text, special tokens included."""

    prompt: str

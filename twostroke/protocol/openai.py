"""The OpenAI schema: what clients send to `/v1/...`; `openai_answers` has what they get back.

Request structs name every field that is served. Fields that clients may send and that would change the answer, but
that are not served yet, stand in `REFUSED`, with the values that ask for nothing and so do no harm. All else that
clients send (`user`, `metadata`, ...) is ignored, as OpenAI does.

Null means "not given" everywhere, because clients send it so.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from twostroke.protocol.openai_tools import NamedTool, ResponseFormat, StructuredOutputs, Tool, ToolCall

NULL = msgspec.Raw(b"null")

REFUSED: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "best_of": (1,),
        "suffix": ("",),
        "use_beam_search": (False,),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
    }
)
"""Fields not served yet, each with the values that change nothing."""

NEVER_SERVED: Mapping[str, str] = MappingProxyType(
    {
        "best_of": "not supported: every sequence that is made is also given back; ask for them with `n`",
        "use_beam_search": "not supported: sequences are sampled; use `temperature`",
    }
)
"""Why a field of `REFUSED` will not be served later either, as the end of a sentence."""

INTERNAL = frozenset(
    {
        "context_phase_params",
        "disaggregated_params",
        "generated_ids",
        "kv_transfer_params",
        "phase",
    }
)
"""Fields that only the cluster's own parts speak of; a public request that carries one is refused."""


class NotServed(msgspec.Struct, kw_only=True):
    """The fields of `REFUSED` and `INTERNAL`, kept undecoded until one is given."""

    best_of: msgspec.Raw = NULL
    suffix: msgspec.Raw = NULL
    use_beam_search: msgspec.Raw = NULL
    functions: msgspec.Raw = NULL
    function_call: msgspec.Raw = NULL
    modalities: msgspec.Raw = NULL
    audio: msgspec.Raw = NULL
    context_phase_params: msgspec.Raw = NULL
    disaggregated_params: msgspec.Raw = NULL
    generated_ids: msgspec.Raw = NULL
    kv_transfer_params: msgspec.Raw = NULL
    phase: msgspec.Raw = NULL


class StreamOptions(msgspec.Struct):
    """What a stream carries besides text.

    Attributes:
        include_usage: A last chunk with the token counts, and `usage: null` in all others.
        continuous_usage_stats: With `include_usage`, the counts so far in all others instead of null (as vLLM does).
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(NotServed, kw_only=True):
    """What both endpoints share.

    Those below `seed` are extra body fields, spelled as vLLM spells them.

    Attributes:
        model: Served name; required by the schema, optional here.
        stream: Answer with server-sent events.
        stream_options: What the stream carries.
        max_tokens: Output length at most.
        temperature: 0 is greedy.
        top_p: Nucleus sampling.
        n: How many choices to make of each prompt; each is another draw.
        stop: Text, or up to `MAX_STOP_STRINGS` texts, that end the output and are not part of it.
        presence_penalty: Makes tokens that are in the output less likely, -2 to 2.
        frequency_penalty: Likewise for each time that they are in it.
        logit_bias: Token id (as text, since JSON has no other keys) and what is added to its logit, -100 to 100.
        seed: Same seed, same output.
        top_k: Keep the k likeliest tokens; 0 and -1 keep all.
        min_p: Keep tokens that are at least this share as likely as the likeliest.
        repetition_penalty: Above 1 makes tokens of prompt and output less likely.
        bad_words: Texts that the output must not hold, at the start of a word or inside one.
        include_stop_str_in_output: The stop text or token that ends the output is part of it.
        min_tokens: Output length at least.
        ignore_eos: The model's end-of-sequence tokens do not end the output.
        stop_token_ids: Further tokens that end the output.
        prompt_logprobs: The logprob of each prompt token and those of the k likeliest tokens there; not in a stream.
        cache_salt: Separates the prefix cache of whoever shares the salt from all others.
        return_token_ids: Each choice also carries the ids of its output tokens, `token_ids`.
        response_format: OpenAI's way to ask for JSON. It and those below exclude each other.
        guided_json: A JSON schema, as an object or as text.
        guided_regex: A regular expression that the whole output matches.
        guided_choice: The output is one of these texts.
        guided_grammar: A grammar in GBNF, or in llguidance's dialect of Lark.
        structured_outputs: vLLM's newer form of the `guided_*` fields.
    """

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    n: int | None = None
    seed: int | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None


class CompletionBody(SamplingFields, kw_only=True):
    """The body of `POST /v1/completions`.

    Attributes:
        prompt: A text, token ids, or a list of texts or of lists of token ids: one choice for each of them.
        logprobs: The chosen token's logprob and those of the k likeliest tokens.
        echo: The answer begins with the prompt, with its logprobs if there are any. `max_tokens` may then be 0.
        tools: None are served here.
    """

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    tools: list[Any] | None = None


class ContentPart(msgspec.Struct):
    """One part of a message; only `text` parts are served."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct, omit_defaults=True):
    """One message of a conversation.

    Attributes:
        role: `system`, `user`, `assistant`, or what else the model's template knows.
        content: Text, or text parts.
        name: Who speaks, for templates that use it.
        tool_calls: What an assistant called.
        tool_call_id: Which call a message of role `tool` answers, for templates that use it.
    """

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class ChatBody(SamplingFields, kw_only=True):
    """The body of `POST /v1/chat/completions`. The fields from `echo` on are spelled as vLLM spells them.

    Attributes:
        messages: The conversation, oldest first.
        max_completion_tokens: OpenAI's newer name of `max_tokens`.
        logprobs: Whether to report logprobs.
        top_logprobs: How many alternatives to report at each token.
        echo: Only false is served.
        add_generation_prompt: The prompt ends with the head of the assistant's next message; given by default.
        continue_final_message: The prompt ends inside the last message, which the model continues.
        chat_template_kwargs: Further inputs of the model's template.
        documents: For templates of models that answer from documents.
        chat_template: Another template; the server must allow it.
        tools: What may be called.
        tool_choice: `none`, `auto` (default), `required`, or the tool to call.
        parallel_tool_calls: Whether one answer may hold several calls; true by default.
    """

    messages: list[ChatMessage]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    echo: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    tools: list[Tool] | None = None
    tool_choice: str | NamedTool | None = None
    parallel_tool_calls: bool | None = None


class TokenizeBody(msgspec.Struct, kw_only=True):
    """The body of `POST /tokenize`: a prompt or messages, and with messages the template's fields of `ChatBody`.

    Attributes:
        model: Served name.
        prompt: A text.
        messages: A conversation.
        add_special_tokens: Add what the tokenizer adds around a text; by default for a prompt, and not for messages,
            whose template has them.
        return_token_strs: Also name the tokens.
    """

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    tools: list[Tool] | None = None
    tool_choice: str | NamedTool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """The body of `POST /detokenize`."""

    tokens: list[int]
    model: str | None = None

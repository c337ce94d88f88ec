"""The `openai` client works unchanged against a real server."""

import math

import openai as openai_errors
import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from tests.support.fake_executor import FakeExecutor, Script
from tests.support.tiny_tokenizer import tiny_tokenizer
from twostroke.protocol.errors import OverloadedError, TransferError
from twostroke.protocol.responses import FinishReason
from twostroke.protocol.tokens import unpack_tokens

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]
TOKENIZER = tiny_tokenizer()


def script_of(text: str, **fields: object) -> Script:
    """A script that answers `text`, one token a step, and then the end-of-sequence token."""
    steps = [(token,) for token in TOKENIZER.encode(text).ids]
    return Script(steps=[*steps, (0,)], stop_token_id=0, **fields)  # type: ignore[arg-type] # fields by name


async def test_a_chat_answers_whole(openai: AsyncOpenAI, executor: FakeExecutor) -> None:
    """Text, finish reason and usage of an answer that is not streamed."""
    executor.script = script_of("Paris is it.", cached_tokens=8)
    answer = await openai.chat.completions.create(model="tiny", messages=MESSAGES)
    request = executor.calls.requests[0]
    assert answer.choices[0].message.content == "Paris is it."
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.id.startswith("chatcmpl-")
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(unpack_tokens(request.prompt_ids))
    assert answer.usage.completion_tokens == len(executor.script.steps)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 8


async def test_a_chat_is_rendered_with_the_models_template(openai: AsyncOpenAI, executor: FakeExecutor) -> None:
    """The prompt is the template's text, its special tokens encoded as such, and nothing around it."""
    await openai.chat.completions.create(model="tiny", messages=MESSAGES)
    prompt_ids = unpack_tokens(executor.calls.requests[0].prompt_ids)
    rendered = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    assert prompt_ids == TOKENIZER.encode(rendered).ids
    assert prompt_ids[0] == 1


async def test_a_chat_streams_role_text_reason_and_usage(openai: AsyncOpenAI, executor: FakeExecutor) -> None:
    """The first chunk carries the role, the last before the counts the reason, and every other one `usage: null`."""
    executor.script = script_of("Paris is it.", cached_tokens=8)
    stream = await openai.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert choices[0].delta.role == "assistant"
    assert [choice.delta.role for choice in choices[1:]] == [None] * (len(choices) - 1)
    assert "".join(choice.delta.content or "" for choice in choices) == "Paris is it."
    assert [choice.finish_reason for choice in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    usage = chunks[-1].usage
    assert usage is not None
    assert (usage.completion_tokens, usage.prompt_tokens_details.cached_tokens) == (len(executor.script.steps), 8)  # type: ignore[union-attr] # always sent
    assert len({chunk.id for chunk in chunks}) == 1


async def test_streamed_and_whole_completions_agree(openai: AsyncOpenAI, executor: FakeExecutor) -> None:
    """The same script gives the same text both ways, here cut by the default of 16 tokens."""
    executor.script = script_of("été 日本語 😀 and more text than sixteen tokens")
    whole = await openai.completions.create(model="tiny", prompt="x")
    stream = await openai.completions.create(model="tiny", prompt="x", stream=True)
    chunks = [chunk async for chunk in stream]
    expected = TOKENIZER.decode([step[0] for step in executor.script.steps[:16]])
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text == expected
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert executor.calls.requests[0].sampling.max_tokens == 16


async def test_a_prompt_may_be_token_ids(openai: AsyncOpenAI, executor: FakeExecutor) -> None:
    """Token ids, alone or as the only one of a list, go to the executor as they are."""
    await openai.completions.create(model="tiny", prompt=[5, 6, 7])
    await openai.completions.create(model="tiny", prompt=[[5, 6, 7]])
    await openai.completions.create(model="tiny", prompt=["ab"])
    prompts = [unpack_tokens(request.prompt_ids) for request in executor.calls.requests]
    assert prompts == [[5, 6, 7], [5, 6, 7], TOKENIZER.encode("ab").ids]


async def test_completion_logprobs(openai: AsyncOpenAI, executor: FakeExecutor) -> None:
    """Parallel lists: the tokens rebuild the text, and the offsets say where each begins."""
    executor.script = script_of("Paris is", finish_reason=FinishReason.STOP)
    answer = await openai.completions.create(model="tiny", prompt="x", logprobs=2)
    logprobs = answer.choices[0].logprobs
    ids = [step[0] for step in executor.script.steps]
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert "".join(logprobs.tokens) == "Paris is<|endoftext|>"
    assert logprobs.token_logprobs == [-token / 100 for token in ids]
    assert logprobs.text_offset == [sum(map(len, logprobs.tokens[:n])) for n in range(len(ids))]
    assert logprobs.top_logprobs is not None
    assert len(logprobs.top_logprobs[0]) == 2
    assert logprobs.top_logprobs[0][logprobs.tokens[0]] == -ids[0] / 100


async def test_chat_logprobs_streamed_carry_the_bytes_of_half_characters(
    openai: AsyncOpenAI, executor: FakeExecutor
) -> None:
    """A character of several tokens makes one chunk with text, which carries the logprobs of all of them."""
    executor.script = script_of("日")
    stream = await openai.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        stream=True,
        logprobs=True,
        top_logprobs=1,
    )
    choices = [chunk.choices[0] async for chunk in stream]
    text = next(choice for choice in choices if choice.delta.content)
    assert text.logprobs is not None
    assert text.logprobs.content is not None
    joined = b"".join(bytes(token.bytes or []) for token in text.logprobs.content)
    assert joined.decode() == text.delta.content == "日"
    assert len(text.logprobs.content) == len(executor.script.steps) - 1
    assert [len(token.top_logprobs) for token in text.logprobs.content] == [1] * len(text.logprobs.content)
    assert all(math.isfinite(token.logprob) for token in text.logprobs.content)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_across_tokens_ends_the_answer(
    openai: AsyncOpenAI, executor: FakeExecutor, *, stream: bool
) -> None:
    """The text ends before the stop string, nothing of it was ever sent, and the engine's work is aborted."""
    executor.script = script_of("one two three four", hold=12)
    answer = await openai.completions.create(
        model="tiny", prompt="x", stop=["o thr", "zzz"], max_tokens=99, stream=stream
    )
    choices = [c.choices[0] async for c in answer] if stream else [answer.choices[0]]  # type: ignore[union-attr] # by `stream`
    request = executor.calls.requests[0]
    assert "".join(choice.text for choice in choices) == "one tw"
    assert choices[-1].finish_reason == "stop"
    assert executor.calls.completed == executor.calls.aborts == [(request.key.client_id, 0)]


async def test_extra_body_fields_reach_the_engine(openai: AsyncOpenAI, executor: FakeExecutor) -> None:
    """Sampling fields beyond OpenAI's, and unknown ones, which are ignored."""
    await openai.completions.create(
        model="tiny",
        prompt="x",
        max_tokens=9,
        temperature=0.5,
        top_p=0.9,
        seed=-3,
        user="someone",
        extra_body={
            "top_k": 7,
            "min_tokens": 2,
            "ignore_eos": True,
            "stop_token_ids": [3, 4],
            "cache_salt": "s",
            "unheard_of": {"a": [1]},
        },
    )
    request = executor.calls.requests[0]
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.top_k) == (9, 2, 7)
    assert (sampling.temperature, sampling.top_p, sampling.ignore_eos) == (0.5, 0.9, True)
    assert sampling.stop_token_ids == (3, 4)
    assert sampling.seed == (1 << 63) - 3
    assert request.cache_salt == "s"
    assert request.deadline_s == 600.0


async def test_a_seed_is_drawn_where_none_is_given(openai: AsyncOpenAI, executor: FakeExecutor) -> None:
    """Two requests without a seed get two different ones."""
    for _ in range(2):
        await openai.completions.create(model="tiny", prompt="x")
    assert len({request.sampling.seed for request in executor.calls.requests}) == 2


async def test_models_are_listed(openai: AsyncOpenAI) -> None:
    """The served model, in the list and by its name."""
    assert [model.id async for model in openai.models.list()] == ["tiny"]
    assert (await openai.models.retrieve("tiny")).id == "tiny"
    with pytest.raises(openai_errors.NotFoundError):
        await openai.models.retrieve("other")


async def test_an_overloaded_executor_is_a_503_with_retry_after(openai: AsyncOpenAI, executor: FakeExecutor) -> None:
    """Before the first byte, also of a stream, a failure is a status code."""
    executor.script = Script(refusal=OverloadedError("no room"))
    with pytest.raises(openai_errors.InternalServerError) as caught:
        await openai.completions.create(model="tiny", prompt="x", stream=True)
    assert caught.value.status_code == 503
    assert caught.value.response.headers["retry-after"] == "1"
    assert caught.value.body == {
        "message": "no room",
        "type": "service_unavailable_error",
        "param": None,
        "code": None,
    }


async def test_a_failure_after_the_first_token_is_one_error_event(openai: AsyncOpenAI, executor: FakeExecutor) -> None:
    """The client gets the text so far, then the error, which its library raises."""
    executor.script = Script(steps=[(40,), (41,)], error=TransferError("the cache could not be moved"))
    stream = await openai.completions.create(model="tiny", prompt="x", stream=True)
    texts: list[str] = []

    async def read() -> None:
        async for chunk in stream:
            texts.append(chunk.choices[0].text)  # noqa: PERF401 - a comprehension would lose them when it raises

    with pytest.raises(openai_errors.APIError, match="the cache could not be moved"):
        await read()
    assert "".join(texts) == TOKENIZER.decode([40, 41])


@pytest.mark.parametrize("stream", [False, True])
async def test_token_ids_come_if_asked_for(openai: AsyncOpenAI, executor: FakeExecutor, stream: bool) -> None:  # noqa: FBT001 - parametrized
    """`return_token_ids` adds the output's ids, the stop token too, whole or in pieces; otherwise none are there."""
    executor.script = script_of("Paris is it.")
    made = [token for step in executor.script.steps for token in step]
    body = {"return_token_ids": True}
    if stream:
        chunks = await openai.completions.create(model="tiny", prompt="Where?", stream=True, extra_body=body)
        ids = [token async for chunk in chunks for token in chunk.choices[0].model_extra["token_ids"]]  # type: ignore[index] # there
    else:
        answer = await openai.completions.create(model="tiny", prompt="Where?", extra_body=body)
        ids = answer.choices[0].model_extra["token_ids"]  # type: ignore[index] # an extra field, there as asked
    assert ids == made
    plain = await openai.completions.create(model="tiny", prompt="Where?")
    assert "token_ids" not in (plain.choices[0].model_extra or {})

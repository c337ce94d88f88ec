"""What `twostroke bench` sends: lengths, arrivals and traces."""

import itertools
import random
from pathlib import Path

import pytest

from twostroke.cli.bench.connection import Target
from twostroke.cli.bench.stream import StreamState
from twostroke.cli.bench.workload import LengthRange, PromptMaker, poisson, read_trace, synthetic
from twostroke.protocol.errors import ConfigError

IDS = PromptMaker(vocab_size=100, text=False)
WORDS = PromptMaker(vocab_size=100, text=True)


def test_lengths_are_fixed_or_uniform() -> None:
    """Both ends of a range are drawn."""
    assert LengthRange.parse("128", "--x") == LengthRange(128, 128)
    source = random.Random(1)
    assert {LengthRange.parse("3:5", "--x").draw(source) for _ in range(100)} == {3, 4, 5}


@pytest.mark.parametrize("text", ["", "0", "5:4", "1:2:3", "x", "-1:4"])
def test_wrong_lengths_are_refused(text: str) -> None:
    """With the option's name."""
    with pytest.raises(ConfigError, match="--prompt-tokens"):
        LengthRange.parse(text, "--prompt-tokens")


def test_the_same_seed_gives_the_same_requests() -> None:
    """And another seed others; token ids keep clear of special ones."""
    lengths = LengthRange(8, 16)

    def drawn(seed: int) -> list[object]:
        return list(itertools.islice(synthetic(IDS, lengths, lengths, seed), 5))

    assert drawn(1) == drawn(1) != drawn(2)
    for work in itertools.islice(synthetic(IDS, lengths, lengths, 1), 50):
        assert isinstance(work.prompt, list)
        assert 8 <= len(work.prompt) <= 16
        assert all(10 <= token_id < 100 for token_id in work.prompt)


def test_text_prompts_have_a_word_for_each_token() -> None:
    """The closest that one can come without the server's tokenizer."""
    prompt = WORDS.make(7, random.Random(1))
    assert isinstance(prompt, str)
    assert len(prompt.split()) == 7


def test_arrivals_begin_at_once_and_have_the_rate() -> None:
    """2000 gaps of a rate of 4 have a mean of 0.25 s within a few percent; the seed is fixed."""
    one = LengthRange(1, 1)
    works = list(itertools.islice(poisson(synthetic(IDS, one, one, 0), 4.0, 0), 2001))
    assert works[0].due_s == 0.0
    assert works[-1].due_s == pytest.approx(500, rel=0.07)


def test_a_trace_gives_prompts_of_all_three_kinds_in_order_of_arrival(tmp_path: Path) -> None:
    """A length is filled with drawn ids."""
    file = tmp_path / "trace.jsonl"
    file.write_text(
        '{"at_s": 2.5, "prompt_tokens": 4, "output_tokens": 3}\n\n'
        '{"at_s": 0, "prompt": "hello", "output_tokens": 1}\n'
        '{"at_s": 1, "prompt_ids": [5, 6], "output_tokens": 2}\n'
    )
    first, second, third = read_trace(file, IDS, 0)
    assert (first.prompt, first.output_tokens, first.due_s) == ("hello", 1, 0)
    assert (second.prompt, second.output_tokens, second.due_s) == ([5, 6], 2, 1)
    assert (len(third.prompt), third.output_tokens, third.due_s) == (4, 3, 2.5)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"output_tokens": 1}', "exactly one of"),
        ('{"output_tokens": 1, "prompt": "a", "prompt_tokens": 2}', "exactly one of"),
        ('{"output_tokens": 0, "prompt": "a"}', "at least 1"),
        ('{"output_tokens": 1, "prompt": "a", "at": 1}', "unknown field `at`"),
        ("{", "truncated"),
    ],
)
def test_a_wrong_line_of_a_trace_is_named(tmp_path: Path, line: str, message: str) -> None:
    """By its number, with what is wrong."""
    file = tmp_path / "trace.jsonl"
    file.write_text('{"output_tokens": 1, "prompt": "a"}\n' + line)
    with pytest.raises(ConfigError, match=f"{file}:2: .*{message}"):
        read_trace(file, IDS, 0)


def test_an_endpoint_may_be_given_with_or_without_v1() -> None:
    """Or below a path."""
    assert Target.parse("http://h:81/v1/") == Target.parse("http://h:81") == Target("h", 81, False, "")
    assert Target.parse("https://h/llm/v1") == Target("h", 443, True, "/llm")
    for url in ("h:80", "http://", "ftp://h", "http://h:x"):
        with pytest.raises(ConfigError, match="--url"):
            Target.parse(url)


def test_a_stream_is_read_however_it_is_cut() -> None:
    """Events with output count; the role, usage and comments do not."""
    events = (
        b': keep-alive\n\ndata: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
        b'data: {"choices":[{"delta":{"content":"a"}}]}\n\ndata: {"choices":[{"text":"b"}],"usage":null}\n\n'
        b'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2}}\n\ndata: [DONE]\n\n'
    )
    for size in (1, 7, len(events)):
        state = StreamState()
        new = [state.push(events[at : at + size]) for at in range(0, len(events), size)]
        assert sum(new) == state.outputs == 2
        assert (state.prompt_tokens, state.output_tokens, state.done, state.error) == (7, 2, True, None)


def test_errors_in_a_stream_are_kept_by_kind() -> None:
    """An error event, and an event that is no JSON."""
    state = StreamState()
    state.push(b'data: {"error":{"message":"m","type":"server_error","code":503}}\n\n')
    assert state.error == "stream error server_error"
    state = StreamState()
    state.push(b"data: {]\n\n")
    assert state.error == "malformed event"

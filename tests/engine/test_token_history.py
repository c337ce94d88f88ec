"""The tokens so far: kept token by token, they are those that counting anew gives."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from twostroke.engine.bad_words import BadWords
from twostroke.engine.token_history import TokenHistory
from twostroke.protocol.sampling import SamplingParams

TOKENS = st.lists(st.integers(0, 400), max_size=300)


@given(prompt=TOKENS, output=TOKENS, received=st.integers(0, 300))
def test_counts_are_those_of_the_output_wherever_it_was_made(
    prompt: list[int], output: list[int], received: int
) -> None:
    """Some of the output is there from the start (a hand-over), the rest comes one by one."""
    history = TokenHistory(prompt, output[:received])
    for token_id in output[received:]:
        history.add(token_id)
    counted = dict(zip(history.token_ids.tolist(), history.output_counts.tolist(), strict=True))
    assert counted == {token: Counter(output)[token] for token in {*prompt, *output}}
    assert len(history) == len(counted)


def test_the_prompt_is_seen_for_repetition_only() -> None:
    """Presence and frequency look at the output alone, so the prompt's tokens need no place."""
    assert len(TokenHistory.wanted(SamplingParams(repetition_penalty=1.1), [1, 2, 2], [3])) == 3
    assert len(TokenHistory.wanted(SamplingParams(presence_penalty=1.0), [1, 2, 2], [3])) == 1


@given(
    words=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=4),
    prompt=st.lists(st.integers(0, 3), min_size=1, max_size=5),
    output=st.lists(st.integers(0, 3), max_size=6),
)
def test_a_token_is_forbidden_if_the_output_with_it_ends_in_a_bad_word(
    words: list[list[int]], prompt: list[int], output: list[int]
) -> None:
    """The prompt does not count: a word may begin there and end in the output."""
    completing = BadWords(map(tuple, words)).completing(prompt + output, len(output))
    expected = {token for token in range(4) for word in words if [*output, token][-len(word) :] == word}
    assert completing == expected

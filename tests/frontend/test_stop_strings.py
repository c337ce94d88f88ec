"""Stop strings are found wherever the text is cut, and nothing of them is given out."""

from hypothesis import given
from hypothesis import strategies as st

from twostroke.frontend.stop_strings import StopStrings


def run(stops: tuple[str, ...], pieces: list[str]) -> tuple[str, bool]:
    """All text that came out, and whether a stop string was found."""
    watcher = StopStrings(stops)
    out = ""
    for piece in pieces:
        text, found = watcher.push(piece)
        out += text
        if found:
            return out, True
    return out + watcher.finish(), False


def test_without_stop_strings_text_passes() -> None:
    """Nothing is held back."""
    assert StopStrings(()).push("anything") == ("anything", False)


def test_text_that_may_become_a_stop_string_is_held() -> None:
    """`END` may begin with the `E`; the next piece settles it."""
    watcher = StopStrings(("END",))
    assert watcher.push("the E") == ("the ", False)
    assert watcher.push("el") == ("Eel", False)
    assert watcher.push(" EN") == (" ", False)
    assert watcher.push("D of it") == ("", True)


def test_held_text_comes_out_at_the_end() -> None:
    """The output ended before the stop string was complete."""
    assert run(("END",), ["an EN"]) == ("an EN", False)


def test_the_stop_string_that_ends_first_counts() -> None:
    """`bc` ends before `abcd` does, although `abcd` starts before it; of two that end together the longer counts."""
    assert run(("abcd", "bc"), ["xabcdx"]) == ("xa", True)
    assert run(("c", "bc"), ["abc"]) == ("a", True)


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    pieces=st.lists(st.text("abc", max_size=4), max_size=8),
)
def test_the_result_does_not_depend_on_the_cuts(stops: list[str], pieces: list[str]) -> None:
    """In pieces, character by character, or at once: the same text comes out."""
    text = "".join(pieces)
    result = run(tuple(stops), pieces)
    assert result == run(tuple(stops), list(text)) == run(tuple(stops), [text])
    assert result[1] == any(stop in text for stop in stops)
    assert not any(stop in result[0] for stop in stops)

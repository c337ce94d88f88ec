"""Philox 4x32-10 against the known-answer vectors of its authors (Random123, kat_vectors)."""

import pytest
import torch

from twostroke.engine.philox import philox, random_words

ONES = 0xFFFFFFFF
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    """Each published counter and key give the published words."""
    words = philox(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
    assert tuple(int(word) for word in words) == expected


def test_words_are_keyed_by_seed_index_and_token() -> None:
    """The seed's two halves are the key; token id and output index are the counter."""
    seed = (0x299F31D0 << 32) | 0xA4093822
    words = random_words(torch.tensor([seed]), torch.tensor([7]), torch.tensor([11]))
    zero = torch.tensor(0)
    expected = philox(
        (torch.tensor(11), torch.tensor(7), zero, zero), (torch.tensor(0xA4093822), torch.tensor(0x299F31D0))
    )
    assert int(words) == int(expected[0])

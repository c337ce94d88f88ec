"""The prefix cache: finding blocks by hash, and the order of eviction."""

import pytest

from twostroke.engine.prefix_cache import PrefixCache

A, B, C = b"a" * 32, b"b" * 32, b"c" * 32


def published(*hashes: bytes) -> PrefixCache:
    """A cache whose blocks 0, 1, ... are published under `hashes`."""
    cache = PrefixCache()
    for block, block_hash in enumerate(hashes):
        cache.publish(block, block_hash)
    return cache


@pytest.mark.parametrize(
    ("asked", "found"),
    [([A, B, C], [0, 1, 2]), ([A, B], [0, 1]), ([A, b"x", C], [0]), ([b"x", A], []), ([], [])],
)
def test_match_gives_the_longest_published_prefix(asked: list[bytes], found: list[int]) -> None:
    """A miss ends the match, even if later hashes are published."""
    assert published(A, B, C).match(asked) == found


def test_the_first_block_published_under_a_hash_stays() -> None:
    """A second block with the same contents is not published, and so not part of the cache."""
    cache = published(A)
    cache.publish(7, A)
    assert cache.match([A]) == [0]
    assert 7 not in cache


def test_a_block_has_one_hash() -> None:
    """Published again under the same hash is fine; under another, its contents changed."""
    cache = published(A)
    cache.publish(0, A)
    with pytest.raises(ValueError, match="block 0"):
        cache.publish(0, B)


def test_the_longest_idle_block_is_evicted_first() -> None:
    """Being held again and given up again makes a block the youngest."""
    cache = published(A, B, C)
    for block in (0, 1, 2):
        cache.mark_idle(block)
    cache.mark_held(0)
    cache.mark_idle(0)
    assert [cache.evict(), cache.evict(), cache.evict()] == [1, 2, 0]
    assert cache.match([A]) == []
    assert cache.consistent()


def test_nothing_idle_nothing_to_evict() -> None:
    """A held block is never evicted."""
    with pytest.raises(KeyError):
        published(A).evict()

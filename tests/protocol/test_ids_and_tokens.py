"""Client ids carry their frontend; token buffers are little-endian int32; block hashes are chained."""

import hashlib
import threading

import pytest

from twostroke.protocol.blockhash import block_hash, hash_blocks, root_hash
from twostroke.protocol.errors import ProtocolError
from twostroke.protocol.ids import (
    LAUNCHING_FRONTEND,
    MAX_FRONTEND_ID,
    ClientIds,
    SequenceKey,
    draw_epoch,
    draw_frontend_id,
    frontend_of,
)
from twostroke.protocol.tokens import pack_tokens, token_count, unpack_tokens


@pytest.mark.parametrize("frontend_id", [LAUNCHING_FRONTEND, 1, MAX_FRONTEND_ID])
def test_a_client_id_names_its_frontend(frontend_id: int) -> None:
    """High 16 bits frontend, low 48 bits counter."""
    ids = ClientIds(frontend_id)
    first, second = ids.draw(), ids.draw()
    assert (frontend_of(first), frontend_of(second)) == (frontend_id, frontend_id)
    assert second - first == 1
    assert first < 1 << 64


@pytest.mark.parametrize("frontend_id", [-1, MAX_FRONTEND_ID + 1])
def test_a_frontend_id_fits_sixteen_bits(frontend_id: int) -> None:
    """Others are refused with the value."""
    with pytest.raises(ValueError, match=str(frontend_id)):
        ClientIds(frontend_id)


def test_threads_draw_distinct_client_ids() -> None:
    """Four threads, 1000 ids each, 4000 distinct ones."""
    ids = ClientIds(3)
    drawn: list[int] = []
    threads = [threading.Thread(target=lambda: drawn.extend(ids.draw() for _ in range(1000))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(drawn)) == 4000


def test_attached_frontends_and_epochs_draw_valid_names() -> None:
    """An attached frontend never takes the launching one's id; an epoch is 63 bits."""
    assert all(1 <= draw_frontend_id() <= MAX_FRONTEND_ID for _ in range(100))
    assert len({draw_epoch() for _ in range(100)}) == 100
    assert 0 <= draw_epoch() < 1 << 63


def test_a_sequence_key_reads_as_hex_and_numbers() -> None:
    """As it stands in logs and errors."""
    assert str(SequenceKey(0xAB, 1, 2)) == "00000000000000ab/1/2"


def test_tokens_are_little_endian_int32() -> None:
    """Byte for byte."""
    assert pack_tokens([1, 258, -1]) == bytes.fromhex("0100000002010000ffffffff")
    assert unpack_tokens(pack_tokens([1, 258, -1])) == [1, 258, -1]
    assert token_count(pack_tokens(range(5))) == 5


def test_a_cut_off_token_buffer_is_refused() -> None:
    """With its length."""
    with pytest.raises(ProtocolError, match="5 bytes"):
        unpack_tokens(b"12345")


def test_a_block_hash_covers_parent_and_tokens() -> None:
    """SHA-256 over the parent's hash and the tokens' bytes."""
    parent = root_hash("digest", "salt")
    tokens = [1, 2, 3, 4]
    assert block_hash(parent, tokens) == hashlib.sha256(parent + pack_tokens(tokens)).digest()


def test_blocks_are_hashed_in_a_chain_and_a_partial_one_is_not() -> None:
    """Ten tokens in blocks of four: two hashes, the second over the first."""
    root = root_hash("digest")
    first, second = hash_blocks(root, list(range(10)), 4)
    assert first == block_hash(root, [0, 1, 2, 3])
    assert second == block_hash(first, [4, 5, 6, 7])


def test_roots_of_other_models_and_salts_differ() -> None:
    """Also where the two strings run together the same."""
    assert len({root_hash("ab", "c"), root_hash("a", "bc"), root_hash("abc"), root_hash("ab", "c2")}) == 4

"""The chained hash that names a full KV block in the prefix cache.

A block's hash covers its parent's hash, its own tokens and, at the root, a salt: equal hashes mean equal tokens from
the start of the sequence on, under the same model and cache salt. SHA-256 makes collisions a non-issue between tenants.
"""

import hashlib
from collections.abc import Sequence

from twostroke.protocol.tokens import pack_tokens

HASH_BYTES = 32


def root_hash(model_digest: str, cache_salt: str = "") -> bytes:
    """The parent of every first block: a digest over the model's digest and the request's `cache_salt`."""
    root = hashlib.sha256()
    for part in (model_digest, cache_salt):
        encoded = part.encode()
        # The length before each part keeps ("ab", "c") and ("a", "bc") apart.
        root.update(len(encoded).to_bytes(8, "little"))
        root.update(encoded)
    return root.digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """SHA-256 over `parent` (32 bytes) and the block's tokens as little-endian int32."""
    return hashlib.sha256(parent + pack_tokens(token_ids)).digest()


def hash_blocks(parent: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Hashes of all full blocks of `token_ids`, first to last; a partial last block has none."""
    hashes = []
    for end in range(block_size, len(token_ids) + 1, block_size):
        parent = block_hash(parent, token_ids[end - block_size : end])
        hashes.append(parent)
    return hashes

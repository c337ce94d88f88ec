"""The prefix cache: which block holds the K and V of which tokens, and which of them may be evicted.

A full block is *published* under its chained hash (`protocol.blockhash`) once its K and V are written. Equal hashes
mean equal tokens from the start of the sequence on, so a later prompt with the same start shares the block. A published
block that nobody holds is *idle*: it keeps its contents until room is needed; the one idle for longest goes first.
"""

from collections import OrderedDict
from collections.abc import Iterable


class PrefixCache:
    """Published blocks by hash, and the idle ones in the order of eviction. Knows nothing of holders."""

    def __init__(self) -> None:
        self._block_by_hash: dict[bytes, int] = {}
        self._hash_by_block: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block: int) -> bool:
        return block in self._hash_by_block

    @property
    def idle(self) -> frozenset[int]:
        """Published blocks that nobody holds."""
        return frozenset(self._idle)

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks published under the longest prefix of `hashes`, first to last."""
        blocks = []
        for block_hash in hashes:
            block = self._block_by_hash.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def publish(self, block: int, block_hash: bytes) -> None:
        """Make `block` findable under `block_hash`, unless another block is already.

        Raises:
            ValueError: The block is published under another hash: its contents changed while others may read them.
        """
        if self._hash_by_block.get(block, block_hash) != block_hash:
            raise ValueError(f"block {block} is published under another hash already")
        if block_hash not in self._block_by_hash:
            self._block_by_hash[block_hash] = block
            self._hash_by_block[block] = block_hash

    def mark_idle(self, block: int) -> None:
        """Nobody holds `block` any more; it is the last to be evicted now."""
        self._idle[block] = None

    def mark_held(self, block: int) -> None:
        """Somebody holds `block` again; it cannot be evicted."""
        del self._idle[block]

    def evict(self) -> int:
        """Forget the block that was idle for longest, and return it.

        Raises:
            KeyError: No block is idle.
        """
        block, _ = self._idle.popitem(last=False)
        del self._block_by_hash[self._hash_by_block.pop(block)]
        return block

    def consistent(self) -> bool:
        """Whether the two directions of the index agree and every idle block is published."""
        back = {block: block_hash for block_hash, block in self._block_by_hash.items()}
        return back == self._hash_by_block and self._idle.keys() <= back.keys()

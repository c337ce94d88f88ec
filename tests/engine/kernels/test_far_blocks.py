"""Caches of more than 2^31 elements: offsets have 64 bits.

The memory is promised by the kernel of the operating system and given page by page as it is touched; the tests touch a
few blocks near the end.
"""

import pytest
import torch

from tests.support.attention_steps import LAYER, LAYERS
from twostroke.engine.attention.contract import AttentionBatch, AttentionForm, ChunkSpan, SingleTokens
from twostroke.engine.attention.gpu import TritonAttention
from twostroke.engine.attention.reference import ReferenceAttention

KV_HEADS, BLOCK_SIZE, HEAD_DIM = 2, 128, 256
BLOCK_ELEMENTS = KV_HEADS * LAYERS * 2 * BLOCK_SIZE * HEAD_DIM
BLOCKS = (1 << 31) // BLOCK_ELEMENTS + 10
CHUNK = 20
TOKENS = 1 + CHUNK


@pytest.mark.parametrize("first", [BLOCKS - 3, (1 << 31) // BLOCK_ELEMENTS - 1])
def test_blocks_beyond_2_to_the_31_elements(first: int) -> None:
    """Written and read where they lie: at the end of the cache, and across the border."""
    far = torch.empty((BLOCKS, KV_HEADS, LAYERS, 2, BLOCK_SIZE, HEAD_DIM), dtype=torch.float16)
    assert far.numel() > 1 << 31
    near = torch.zeros((3, *far.shape[1:]), dtype=torch.float16)
    far[first : first + 3] = 0
    query, key, value = torch.randn((3, TOKENS, KV_HEADS, HEAD_DIM)).half()
    outputs = [
        backend.prepare(batch(start))(LAYER, query, key, value, AttentionForm(0.1))
        for backend, start in ((TritonAttention(far, KV_HEADS), first), (ReferenceAttention(near), 0))
    ]
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=2e-3)
    assert torch.equal(far[first : first + 3], near)


def batch(first: int) -> AttentionBatch:
    """A decode with all of block `first` and the first token of the next, and a chunk in the one after that."""
    chunk_slots = torch.arange(CHUNK) + (first + 2) * BLOCK_SIZE
    return AttentionBatch(
        slots=torch.cat([torch.tensor([(first + 1) * BLOCK_SIZE]), chunk_slots]),
        blocks=torch.tensor([first, first + 1, first + 2]),
        singles=SingleTokens(torch.tensor([0]), torch.tensor([BLOCK_SIZE + 1])),
        chunks=[ChunkSpan(first_token=1, tokens=CHUNK, start=0, first_block=2)],
    )

"""A model whose KV cache has the demo model's layout, and which computes next to nothing.

30 layers with 3 KV heads of 64, in bfloat16: 360 KiB a block of 16 tokens. Its weights are random and its layers
narrow, so that a prompt of 4096 tokens is read in seconds on one thread, and what takes time is the hand-over.
"""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models

from tests.support.text_models import save_tokenizer
from tests.support.tiny_models import VOCAB_SIZE, save_tiny_model

MAX_MODEL_LEN = 4352
BLOCK_TOKENS = 16
BLOCK_BYTES = 30 * 3 * 64 * 2 * 2 * BLOCK_TOKENS
"""Layers, KV heads, head size, K and V, bytes of an element, tokens."""


def save_demo_kv_model(folder: Path) -> Path:
    """Make the model in `folder`, which is returned."""
    save_tiny_model(
        folder,
        dtype=torch.bfloat16,
        hidden_size=48,
        num_hidden_layers=30,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=MAX_MODEL_LEN,
    )
    # Each token is a word, so that each makes a chunk of its own.
    words = {f"w{number}": number for number in range(VOCAB_SIZE)}
    save_tokenizer(folder, Tokenizer(models.WordLevel(words)))
    return folder

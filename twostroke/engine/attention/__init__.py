"""Attention over the paged KV cache: one contract, a torch reference, and the CPU path."""

"""Moves paged KV blocks between processes. Knows buffers and block numbers, never sequences' tokens or models."""

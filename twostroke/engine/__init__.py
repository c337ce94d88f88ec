"""The engine: scheduler, KV block manager, model runner, attention and sampler."""

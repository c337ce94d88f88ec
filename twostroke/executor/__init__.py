"""`GenerationExecutor`: the boundary that takes requests and gives results, wherever the engine runs. No torch."""

"""`twostroke bench`: load on an OpenAI-compatible endpoint, and what its users would feel."""

"""Tools in chats: what may be called, how a model is told, and how its calls are read from its text."""

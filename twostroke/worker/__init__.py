"""The process that holds an engine: rank world, engine loop, I/O thread, and the in-process form."""

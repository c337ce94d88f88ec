"""Runs the decoder layers of common models through compiled loops on the CPU, between the library's matrix products."""

"""Typed, authenticated ZMQ queues between frontends and workers. Imports `protocol` alone."""

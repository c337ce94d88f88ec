"""The context role: reads prompts, makes the first token, and leases the KV cache to a generation server.

* `main`       the server process: HTTP port, and the launcher of its world
* `worker`     `python -m context_server.worker`, the world
* `lifecycle`  the role's part of a request's life
"""

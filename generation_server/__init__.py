"""The generation role: takes a KV cache over from a context server, and makes all later tokens.

* `main`       the server process: HTTP port, and the launcher of its world
* `worker`     `python -m generation_server.worker`, the world
* `lifecycle`  the role's part of a request's life
"""

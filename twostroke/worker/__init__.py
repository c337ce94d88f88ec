"""The other side of the executor boundary: the process, or thread, that holds an engine.

* `engine_loop`  the engine thread: inbound -> role part -> engine step -> outputs
* `role_part`    what a role adds to that loop; `context_server` and `generation_server` bring theirs
* `inbox`, `outbox`, `pulse`   what the engine thread and the I/O thread share, and nothing else
* `io_thread`    the thread that owns every socket of the executor boundary
* `transfer`     from configuration to a role's KV transfer agent
* `loading`      from configuration to a loaded engine
* `main`         a worker process from its launch to its exit code
* `in_process`   the same loop in the caller's process
"""

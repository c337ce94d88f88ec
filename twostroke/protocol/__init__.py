"""Every type that crosses a process or a host. No I/O happens here, and nothing here imports torch.

* `ids`        client ids, sequence keys, worker epochs
* `tokens`     token ids as little-endian int32 buffers
* `sampling`   how the next token is chosen
* `requests`   what a frontend sends to a worker
* `responses`  what a worker sends back
* `worker`     identities, readiness, load, attach
* `transfer`   KV handles, context_phase_params, and the control messages between generation and context
* `blockhash`  the chained hash of the prefix cache
* `config`     the one YAML document, checked at start
* `errors`     the tree of errors
"""

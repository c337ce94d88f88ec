"""Every type that crosses a process or a host. No I/O happens here, and nothing here imports torch.

* `ids`        client ids, sequence keys, worker epochs
* `tokens`     token ids as little-endian int32 buffers
* `sampling`   how the next token is chosen
* `constraint`, `grammar`   what the text of an output must look like, and how llguidance is told
* `requests`   what a frontend sends to a worker
* `responses`  what a worker sends back
* `prompt_logprobs`   logprobs of a prompt, in buffers
* `worker`     identities, readiness, load, attach
* `transfer`   KV handles, context_phase_params, and the control messages between generation and context
* `blockhash`  the chained hash of the prefix cache
* `openai`, `openai_answers`, `openai_tools`   what clients send, what they get, and what both share
* `config`, `config_faults`   the one YAML document, checked at start, and its mistakes in words
* `errors`     the tree of errors
"""

"""`twostroke doctor`: whether this host can serve, and what would make it serve better.

    probes   read the system; what may crash or hang (drivers, UCX, model libraries) runs in a child with a deadline
    facts    what a probe found, as plain data
    checks   facts to findings, pure
    report   findings to a table or JSON, and the exit status

This process loads neither torch nor UCX.
"""

"""The router: one HTTP endpoint over all workers, and the `GenerationExecutor` that joins the two phases.

* `ledger`        one entry for each request: phase, workers, attempt, times
* `policy`        which worker gets the next request
* `workers`       the states of one worker address, and one attached worker epoch
* `addresses`     configured addresses, `dns://` names among them, to ZMQ addresses
* `pool`          keeps every configured worker attached
* `dispatch`      places requests on workers; the bounded queue of those that must wait
* `request_life`  one request from its first leg to its one final event
* `legs`          the sink of each submission to a worker
* `executor`      `RouterExecutor`: the three verbs over all of it
* `admin`         `/ledger` and `/workers`
* `metrics`       what Prometheus scrapes
* `main`          the process
"""

"""`twostroke up`: router, context and generation servers on this host, supervised until Ctrl-C."""

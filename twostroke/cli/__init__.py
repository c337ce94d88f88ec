"""The `twostroke` command."""

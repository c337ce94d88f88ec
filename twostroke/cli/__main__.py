"""`python -m twostroke.cli` is `twostroke`."""

from twostroke.cli.main import main

main()

"""`python -m twostroke.worker`: a worker that runs whole requests. Started by a launcher, never by hand."""

import sys

from twostroke.worker.main import run_worker

sys.exit(run_worker())

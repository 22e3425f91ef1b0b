"""Every algorithm of sparsecomm beside every baseline, on the same inputs, in one run: ``python -m bench.compare``."""

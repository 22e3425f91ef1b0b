"""Compute time / wall time of training over links with a rate, a delay and losses: docs/reports/slow-links.md."""

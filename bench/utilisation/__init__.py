"""How much of its time training computes, over links with a rate, a delay and losses: docs/reports/slow-links.md."""

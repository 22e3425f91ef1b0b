"""Experiments behind the reports: training runs on simulated ranks, in which rules and settings compete.

Each module is a command, ``python -m bench.experiments.NAME``. `grid` runs the combinations of settings and keeps their
outcomes, `tasks` has the models and the data, and `trainer` has the steps that all runs share.
"""

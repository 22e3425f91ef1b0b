"""Observers of calls, the trace files that ranks write, and the analysis of these files."""

"""Observers of calls, the trace files that ranks write, and what these files tell about a run."""

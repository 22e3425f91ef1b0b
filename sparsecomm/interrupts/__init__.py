"""Steps that no exception of a signal handler divides."""

from sparsecomm.interrupts import _steps

__all__ = ["persevere", "run_all"]

persevere = _steps.persevere
run_all = _steps.run_all

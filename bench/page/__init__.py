"""A page of all results with tables and plots: ``make report``, or ``python -m bench.page``."""

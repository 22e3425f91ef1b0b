"""What commands and the benchmarks in ``bench/`` share: types of arguments, tables and plots, machines, timing."""

"""The gTop-k paper's table of throughputs, on an emulated network: see docs/reports/speed.md."""

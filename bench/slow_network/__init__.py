"""A slow network on one machine: see bench/slow_network/README.md."""

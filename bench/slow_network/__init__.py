"""A slow network on one machine: see docs/slow-network.md."""

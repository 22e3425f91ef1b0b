"""A slow network on one machine: see docs/internals/slow-network.md."""

"""Other people's tests, with this library switched in: see docs/internals/conformance.md."""

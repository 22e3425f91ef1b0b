"""Other people's tests, with this library switched in: see tests/conformance/README.md."""

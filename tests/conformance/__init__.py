"""Tests of other projects, run with this library: see tests/conformance/README.md."""

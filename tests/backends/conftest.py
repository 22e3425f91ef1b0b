"""The device that a test runs on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.backends.devices import DEVICES, Device, made


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    with made(request.param) as found:
        yield found

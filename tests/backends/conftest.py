"""The device that a test runs on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.backends.devices import DEVICES, Device, device_named


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    with device_named(request.param) as backend_device:
        yield backend_device

"""The address that a rank tells the others."""

from __future__ import annotations

import socket

import pytest

from sparsecomm.errors import TransportError
from sparsecomm.transport.process_group.joining import own_address


def test_of_an_interface(monkeypatch: pytest.MonkeyPatch) -> None:
    for names in ("lo", " lo , other"):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", names)
        assert own_address() in ("127.0.0.1", "::1")


def test_an_interface_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth77")
    with pytest.raises(TransportError, match=r"GLOO_SOCKET_IFNAME='eth77': there is no .*'eth77'.* lo"):
        own_address()


@pytest.mark.parametrize("found", [None, [], ["192.0.2.1"], ["192.0.2.1", "127.0.0.3"]])
def test_of_the_host_where_it_has_one_of_its_own(found: list[str] | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def getaddrinfo(*_: object, **__: object) -> list[object]:
        if found is None:
            raise OSError("no name")
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, 0)) for address in found]

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    assert own_address() == ("127.0.0.3" if found and "127.0.0.3" in found else "127.0.0.1")

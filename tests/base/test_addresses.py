"""Addresses of servers against curl's rules for proxies, and every way in which an address is written."""

import os

import pytest

from roll_opd.base.addresses import address_fault, below, exempt_loopback, proxy_of, server_root

PROXY_VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY")


@pytest.fixture(autouse=True)
def without_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROXY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


def test_the_environment_names_the_proxy_of_a_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://user:secret@proxy:3128")
    monkeypatch.setenv("all_proxy", "other:1080")
    monkeypatch.setenv("NO_PROXY", ".corp, 10.0.0.0/8,exact:8000,*.wild,[fd00::1]:80,fd01::/16")
    used = {"http://far/": "HTTP_PROXY", "https://far/": "all_proxy", "http://exact:8001/": "HTTP_PROXY"}
    used |= {"http://11.0.0.1/": "HTTP_PROXY", "http://notcorp/": "HTTP_PROXY", "http://[fd00::1]:81/": "HTTP_PROXY"}
    for url, variable in used.items():
        proxy = proxy_of(url)
        assert proxy and proxy.variable == variable and "secret" not in str(proxy), url
    for host in ("a.corp", "corp", "10.1.2.3:9", "exact:8000", "x.wild", "[fd00::1]", "[fd01::5]:7"):
        assert proxy_of(f"http://{host}/v1") is None, host
    for host in (
        "localhost",
        "127.0.0.1:8000",
        "127.3.4.5",
        "[::1]:8000",
        "0.0.0.0",
        "a.localhost",
        "[::ffff:127.0.0.1]",
    ):
        assert proxy_of(f"http://{host}/v1") is None and proxy_of(f"https://{host}/v1") is None, host
    monkeypatch.setenv("no_proxy", "*")
    assert proxy_of("http://far/") is None
    for unusable in ("ftp://proxy:1", "socks4://proxy:1"):
        monkeypatch.setenv("no_proxy", "")
        monkeypatch.setenv("HTTP_PROXY", unusable)
        with pytest.raises(ValueError, match="HTTP_PROXY"):
            proxy_of("http://far/")


def test_libraries_ask_this_machine_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    exempt_loopback()
    assert "NO_PROXY" not in os.environ
    monkeypatch.setenv("https_proxy", "http://proxy:3128")
    monkeypatch.setenv("NO_PROXY", "corp")
    monkeypatch.setenv("no_proxy", "")
    monkeypatch.delenv("no_proxy")
    exempt_loopback()
    exempt_loopback()
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == "corp,localhost,127.0.0.1,::1"


@pytest.mark.parametrize("path", ["/v1/completions", "/inference/v1/generate", "/generate"])
def test_a_server_is_the_same_however_its_address_is_written(path: str) -> None:
    for host in ("http://host:8000", "https://host", "http://[::1]:8000", "https://host/of/a/gateway"):
        for end in ("", "/", "/v1", "/v1/", "/v1/completions", "/v1/chat/completions", "/v1/models/", path, f"{path}/"):
            assert server_root(host + end, path) == host
            assert below(server_root(f"{host}{end}?key=1", path), path) == f"{host}{path}?key=1"


def test_a_text_that_is_no_address_says_what_to_write() -> None:
    for text in ("http://host", "https://host:8000/v1/", "http://[::1]:8000/v1", "http://host/v1?version=2"):
        assert address_fault(text) is None, text
    for text in ("host:8000/v1", "localhost:8000", "10.0.0.1"):
        assert f"http://{text}" in (address_fault(text) or ""), text
    for text in ("", "ftp://host", "http://", "http://host:port", "http://host:99999", "two words"):
        assert "http://host:8000" in (address_fault(text) or ""), text
    for text in ("http://::1:8000", "http://fe80::1/v1"):
        assert "[::1]" in (address_fault(text) or ""), text

"""Addresses of HTTP servers: the forms in which users write them, and the proxy of each address.

Every HTTP client of the package gets its proxy from `proxy_of`. Libraries with their own client, such as trackers, read
the environment variables; `exempt_loopback` adds this machine to NO_PROXY for them.
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from urllib.parse import urlsplit, urlunsplit

from roll_opd.base.installed import is_installed

OPENAI = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/responses", "/v1/embeddings")
LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Proxy:
    """A proxy, and the environment variable that names it."""

    url: str
    variable: str

    def __str__(self) -> str:
        """Return the variable and the proxy's address without user name and password."""
        parts = urlsplit(self.url)
        return f"{self.variable}={urlunsplit((parts.scheme, parts.netloc.rpartition('@')[2], '', '', ''))}"


def proxy_of(url: str) -> Proxy | None:
    """Return the proxy that the environment names for `url`; None for a direct connection.

    As for curl and requests, the variables are HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY, and a name in lower
    case goes first. NO_PROXY lists host names with their subdomains, addresses, networks (10.0.0.0/8), or `*`; each may
    have a port. A loopback address never has a proxy. Raises ValueError for a proxy that cannot be used.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    found = _variable(f"{parts.scheme}_proxy") or _variable("all_proxy")
    if found is None or is_loopback(host):
        return None
    exempt = _variable("no_proxy")
    port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    if exempt and any(_covers(entry, host, port) for entry in exempt[1].replace(" ", ",").split(",")):
        return None
    name, value = found
    proxy = Proxy(value if "://" in value else f"http://{value}", name)
    scheme = urlsplit(proxy.url).scheme
    remedy = f"correct {name}, or add {host} to NO_PROXY"
    if scheme not in ("http", "https", "socks5", "socks5h") or not urlsplit(proxy.url).hostname:
        raise ValueError(f"{proxy} is not a proxy such as http://host:3128; {remedy}")
    if scheme.startswith("socks") and not is_installed("socksio"):
        raise ValueError(f"{proxy} needs the package socksio; run `pip install socksio`, or {remedy}")
    return proxy


def is_loopback(host: str) -> bool:
    """Return whether a host name or an address means this machine."""
    host = host.lower().rstrip(".")
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ip_address(host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None) or address  # ::ffff:127.0.0.1
    return bool(mapped.is_loopback or mapped.is_unspecified)


def exempt_loopback() -> None:
    """Add this machine's loopback addresses to NO_PROXY, for this process and the processes that it starts."""
    value = (_variable("no_proxy") or ("", ""))[1]
    entries = [entry for entry in value.replace(" ", ",").split(",") if entry]
    if "*" not in entries and any(_variable(f"{kind}_proxy") for kind in ("http", "https", "all")):
        text = ",".join([*entries, *(name for name in LOOPBACK if name not in entries)])
        os.environ |= {"no_proxy": text, "NO_PROXY": text}


def _variable(name: str) -> tuple[str, str] | None:
    """Return (name, value) of an environment variable in lower or upper case; None if it is unset or empty."""
    if name in os.environ:  # an empty lower-case name switches the other off
        return (name, os.environ[name].strip()) if os.environ[name].strip() else None
    value = os.environ.get(name.upper(), "").strip()
    return (name.upper(), value) if value else None


def _covers(entry: str, host: str, port: int | None) -> bool:
    """Return whether an entry of NO_PROXY covers a host."""
    if entry == "*":
        return True
    wanted = entry.strip().lower()
    name, colon, digits = wanted.rpartition(":")
    if colon and digits.isdigit() and (":" not in name or name.endswith("]")):
        if int(digits) != port:
            return False
        wanted = name
    wanted = wanted.strip("[]")
    try:
        return ip_address(host) in ip_network(wanted, strict=False)
    except ValueError:
        wanted = wanted.removeprefix("*").strip(".")
        return bool(wanted) and f".{host.lower().rstrip('.')}".endswith(f".{wanted}")


def address_fault(text: str) -> str | None:
    """Return why a text is not the address of an HTTP server, and what to write; None if it is an address."""
    shown = re.sub(r"//[^/]*@|\?.*", "", text)  # may contain a key
    try:
        parts = urlsplit(text)
        if parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1) > 0:
            return None
        is_lacking = "://" not in text and bool(urlsplit(f"//{text}").hostname) and not re.search(r"\s", text)
    except ValueError:
        is_lacking = False
    if is_lacking:
        return f"is not an address, because it lacks http:// or https://; write http://{shown}"
    if re.fullmatch(r"https?://[0-9a-fA-F:]*::?[0-9a-fA-F:]*(/.*)?", shown):
        return "is not an address; write an IPv6 address in brackets, such as http://[::1]:8000"
    return "is not an address; write an address such as http://host:8000"


def server_root(url: str, *paths: str) -> str:
    """Return the address of a server without the API path with which it was written.

    `http://host/v1/`, `http://host/v1/completions` and `http://host/` become `http://host`. A query stays.

    Args:
        url: the address as written.
        paths: paths that requests use on this server; `url` may end with one of them, or with a beginning of it.
    """
    parts = urlsplit(url)
    given = parts.path.rstrip("/")
    ends = {end for path in (*paths, *OPENAI) for end in _beginnings(path)}
    longest = max((end for end in ends if given.endswith(end)), key=len, default="")
    return urlunsplit(parts._replace(path=given.removesuffix(longest)))


def chat_url(url: str) -> str:
    """Return the URL of the chat completions API, for example `http://host/v1/chat/completions`.

    `url` is `http://host`, `http://host/v1`, the full URL, or the URL of another method of the same API.
    """
    if address_fault(url):
        return url  # `http_endpoint.Endpoint` reports the error
    base = re.sub(r"(/chat)?/(completions|models|responses|embeddings)$", "", urlsplit(url).path.rstrip("/"), count=1)
    return urlunsplit(urlsplit(url)._replace(path=f"{base or '/v1'}/chat/completions"))


def below(root: str, path: str) -> str:
    """Return the URL of a path on a server."""
    parts = urlsplit(root)
    return urlunsplit(parts._replace(path=parts.path + path))


def _beginnings(path: str) -> Iterable[str]:
    words = path.split("/")
    return ("/".join(words[:count]) for count in range(2, len(words) + 1))

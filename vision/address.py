"""Which hosts and addresses an image may be fetched from. Pure functions but for the name look-up.

Called by `source.py` in the API process, for the first URL and again for every redirect.

An address is good only when it is in the public, unicast Internet. IPv6 addresses that carry an IPv4 address (mapped,
6to4, NAT64) are judged by that one too; Teredo, which carries a client's address in disguise, is always refused.
"""

import asyncio
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Sequence

from vision.errors import SourceFailed, SourceRefused, echo

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""(host, port) -> its addresses in text form."""

HOST_NAME = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)(\.(?!-)[a-z0-9_-]{1,63}(?<!-))*")
NUMERIC_LABEL = re.compile(r"[0-9]+|0x[0-9a-f]*")
DEFAULT_PORTS = {"http": 80, "https": 443}

REFUSED_IPV4 = tuple(
    ipaddress.IPv4Network(network)
    for network in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "168.63.129.16/32",  # the host of an Azure machine, a public address that only that machine can reach
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.0.2.0/24",
        "192.88.99.0/24",
        "192.168.0.0/16",
        "198.18.0.0/15",
        "198.51.100.0/24",
        "203.0.113.0/24",
        "224.0.0.0/3",
    )
)
UNICAST_IPV6 = ipaddress.IPv6Network("2000::/3")
REFUSED_IPV6 = tuple(
    ipaddress.IPv6Network(network)
    for network in ("2001::/23", "2001:db8::/32", "3fff::/20")  # Teredo is in the first
)
NAT64 = ipaddress.IPv6Network("64:ff9b::/96")


def is_public(address: str) -> bool:
    """Whether the address is one of the public unicast Internet. False for what is not an address in canonical form
    (decimal, hex, octal or short spellings) and for one with a zone."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(parsed, ipaddress.IPv4Address):
        return _is_public_ipv4(parsed)
    if parsed.scope_id is not None:
        return False
    if parsed.ipv4_mapped is not None:
        return _is_public_ipv4(parsed.ipv4_mapped)
    if parsed in NAT64:
        return _is_public_ipv4(ipaddress.IPv4Address(int(parsed) & 0xFFFFFFFF))
    if parsed.sixtofour is not None and not _is_public_ipv4(parsed.sixtofour):
        return False
    return parsed in UNICAST_IPV6 and parsed.is_global and not any(parsed in network for network in REFUSED_IPV6)


def _is_public_ipv4(address: ipaddress.IPv4Address) -> bool:
    return address.is_global and not any(address in network for network in REFUSED_IPV4)


def check_host(scheme: str, host: str, port: int | None, allowed: Sequence[str]) -> int:
    """The port to connect to. `host` is lower-case ASCII (IDNA applied), `port` None for the scheme's own.

    An entry of `allowed` is `host` (that name only), `.domain` (the domain and every name below it), or either with
    `:port`; an entry without a port allows only the scheme's own. Raises SourceRefused.
    """
    default_port = DEFAULT_PORTS[scheme]
    wanted = default_port if port is None else port
    if not HOST_NAME.fullmatch(host) and not _is_literal(host):
        raise SourceRefused(f"The image host {echo(host)} is not a plain host name")
    if NUMERIC_LABEL.fullmatch(host.rsplit(".", 1)[-1]) and not _is_literal(host):
        raise SourceRefused(f"The image host {echo(host)} is a number, not a name; such spellings are refused")
    if not any(_matches(entry.lower(), host, wanted, default_port) for entry in allowed):
        known = "images may only be sent as data: URLs" if not allowed else "it is not among the allowed media domains"
        raise SourceRefused(f"Images may not be fetched from {echo(host)} at port {wanted}: {known}")
    return wanted


def _is_literal(host: str) -> bool:
    try:
        return str(ipaddress.ip_address(host)) == host
    except ValueError:
        return False


def _matches(entry: str, host: str, port: int, default_port: int) -> bool:
    """`entry` is one of the allowed domains; an IPv6 address with a port is written in brackets."""
    name, colon, digits = entry.rpartition(":")
    if not colon or not digits.isdecimal() or (":" in name and not name.endswith("]")):
        name, digits = entry, str(default_port)
    name = name.strip("[]")
    if int(digits) != port:
        return False
    if name.startswith("."):
        return host == name[1:] or host.endswith(name)
    return host == name


async def public_address(host: str, port: int, resolve: Resolve) -> str:
    """The one address to connect to: the host is looked up once, and every answer must be public, or one lucky answer
    would hide an internal one. IPv4 first. Raises SourceRefused, or SourceFailed when there is no answer."""
    answers = [host] if _is_literal(host) else list(await resolve(host, port))
    if not answers:
        raise SourceFailed(f"The image host {echo(host)} has no address")
    if not all(is_public(address) for address in answers):
        raise SourceRefused(f"The image host {echo(host)} has an address that is not public")
    return min(answers, key=lambda address: ":" in address)


async def resolve_host(host: str, port: int) -> Sequence[str]:
    """The system's addresses of the name. Raises SourceFailed when it is not known."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise SourceFailed(f"The image host {echo(host)} was not found") from error
    return [str(entry[4][0]) for entry in found]

"""Where an image may be fetched: the policy holds for every spelling, name server and redirect."""

import time

import pytest

from tests.vision.canary import ALLOWED, SITE, Names, answer, canary, moved, run, site
from tests.vision.pictures import FILES
from vision.address import is_public, resolve_host
from vision.errors import BadImageUrl, SourceFailed, SourceRefused
from vision.limits import ImageLimits
from vision.source import Fetcher

PNG = FILES["png"]


# what may be fetched


def test_nothing_is_fetched_by_default() -> None:
    async def main() -> None:
        fetcher = Fetcher(ImageLimits(), resolve=Names())
        with pytest.raises(SourceRefused, match="only be sent as data: URLs"):
            await fetcher.fetch("https://example.com/a.png")
        await fetcher.aclose()

    run(main())


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True), ("8.8.8.8", True), ("2606:2800:220:1::1", True), ("64:ff9b::808:808", True),
        ("::ffff:8.8.8.8", True), ("2002:808:808::1", True), ("192.0.1.1", True),
        ("127.0.0.1", False), ("127.255.0.9", False), ("10.1.2.3", False), ("172.16.0.1", False),
        ("172.31.255.255", False),
        ("192.168.1.1", False), ("169.254.169.254", False), ("100.64.0.1", False), ("100.100.100.200", False),
        ("168.63.129.16", False), ("0.0.0.0", False), ("0.1.2.3", False), ("192.0.0.192", False),
        ("192.88.99.1", False),
        ("198.18.0.1", False), ("203.0.113.5", False), ("224.0.0.1", False), ("240.0.0.1", False),
        ("255.255.255.255", False), ("::", False), ("::1", False), ("fe80::1", False), ("fe80::1%eth0", False),
        ("fc00::1", False), ("fd00:ec2::254", False), ("fec0::1", False), ("ff02::1", False), ("2001:db8::1", False),
        ("::ffff:127.0.0.1", False), ("::ffff:a9fe:a9fe", False), ("::127.0.0.1", False), ("64:ff9b::7f00:1", False),
        ("64:ff9b:1::808:808", False), ("2002:7f00:1::1", False), ("2002:a9fe:a9fe::", False),
        ("2001:0:4136:e378:8000:63bf:3fff:fdd2", False), ("3fff::1", False), ("5f00::1", False), ("100::1", False),
        ("2130706433", False), ("0x7f.1", False), ("0177.0.0.1", False), ("127.1", False), ("", False), ("a.b", False),
        ("2606:2800:220:1::1%eth0", False), ("08.8.8.8", False),
    ],
)  # fmt: skip
def test_public_addresses(address: str, public: bool) -> None:
    assert is_public(address) is public


LOOPBACK = (
    "127.0.0.1", "127.1", "127.0.1", "127.0.0.1.", "127.127.127.127", "2130706433", "0x7f000001", "0x7F.0.0.1",
    "0x7f.1",
    "017700000001", "0177.0.0.1", "0177.1", "00000177.0.0.1", "127.0.0.01", "0", "0.0.0.0", "0x0", "1.0x7f", "0x",
    "[::1]", "[::]", "[0:0:0:0:0:0:0:1]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[0:0:0:0:0:ffff:7f00:1]",
    "[::127.0.0.1]", "[64:ff9b::7f00:1]", "[2002:7f00:1::]", "[2001:0:7f00:1::]", "[fe80::1%25lo]", "[::1%25lo]",
    "localhost", "LOCALHOST", "localhost.", "localhost.localdomain", "ip6-localhost",
    "\uff11\uff12\uff17.0.0.1", "127\u30020\u30020\u30021", "\u2460\u2461\u2466.0.0.1", "\u24db\u24de\u24d2alhost",
    "127%2e0.0.1", "local%68ost", "img.test@127.0.0.1", "img.test:80@127.0.0.1", "127.0.0.1#@img.test",
    "127.0.0.1%00.img.test", "-127.0.0.1", "img..test", "_.127.0.0.1", "169.254.169.254", "[fd00:ec2::254]", "10.0.0.1",
    "img.test", "inner.cdn.test",
)  # fmt: skip


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("trusting", [True, False])
def test_no_spelling_of_an_inner_address_reaches_it(scheme: str, trusting: bool) -> None:
    """53 spellings, with a domain list that allows each host literally and one that allows only names; the name server
    answers every name with a loopback address, and connections are real."""

    async def main() -> None:
        async with canary() as bird:
            literal = tuple(f"{host.lower().strip('.')}:{bird.port}" for host in LOOPBACK if not set("@%#") & set(host))
            names = (f"img.test:{bird.port}", f".cdn.test:{bird.port}")
            limits = ImageLimits(allowed_media_domains=(*names, *literal) if trusting else names)
            fetcher = Fetcher(limits, resolve=Names(["127.0.0.1"]))
            for host in LOOPBACK:
                for port in (f":{bird.port}", ""):
                    with pytest.raises((SourceRefused, BadImageUrl)):
                        await fetcher.fetch(f"{scheme}://{host}{port}/a.png")
            assert bird.seen == []
            await fetcher.aclose()

    run(main())


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd", "FILE:///etc/passwd", "ftp://img.test/a", "gopher://img.test/", "javascript:alert(1)",
        "blob:https://img.test/1", "about:blank", "jar:http://img.test!/a", "unix:/run/docker.sock", "ws://img.test/",
        "//img.test/a.png", "/etc/passwd", "img.test/a.png", "", " ", "http:", "http://", "http:///a.png",
        "https:img.test",
        "http:\\\\img.test\\a", "http://img.test\\@127.0.0.1/", "http://img.test/a b", "http://img.test/\r\nX: y",
        "http://img.test/\ta", "http://u:p@img.test/", "http://u@img.test/", "http://img.test:8080/", "http://img.test:443/",
        "https://img.test:80/", "http://img.test:99999/", "http://img.test:x/", "http://img.test.evil.test/",
        "http://evilimg.test/", "http://a.img.test/", "http://evilcdn.test/", "http://img.test./", "http://[img.test]/",
        "http://img.test/" + "a" * 9000, "http://" + "a" * 300 + ".cdn.test/", "http://-a.cdn.test/", "http://\u0000.cdn.test/",
    ],
)  # fmt: skip
def test_urls_outside_the_policy(url: str) -> None:
    async def main() -> None:
        async with site(ALLOWED) as (bird, fetcher, detour):
            start = time.perf_counter()
            with pytest.raises((SourceRefused, BadImageUrl)) as caught:
                await fetcher.fetch(url)
            assert time.perf_counter() - start < 0.5 and len(str(caught.value)) < 300
            assert bird.seen == [] and detour.requests == []

    run(main())


def test_allowed_domains_and_ports() -> None:
    allowed = ("IMG.test", ".cdn.test", "other.test:8443", "\u0062\u00fccher.test", "xn--bcher-kva.test", SITE)

    async def main() -> None:
        async with site(ImageLimits(allowed_media_domains=allowed)) as (bird, fetcher, _):
            bird.pages["/a"] = answer(PNG)
            for origin in (
                "http://img.test", "https://img.test", "http://IMG.TEST:80", "https://img.test:443", "http://cdn.test",
                "http://a.b.cdn.test", "https://other.test:8443", "http://other.test:8443", "http://b\u00fccher.test",
                f"http://{SITE}",
            ):  # fmt: skip
                assert await fetcher.fetch(f"{origin}/a") == PNG, origin
            with pytest.raises(SourceRefused, match="not among the allowed media domains"):
                await fetcher.fetch("https://other.test/a")

    run(main())


# name servers and connections


def test_the_connection_goes_to_the_address_that_was_checked() -> None:
    names = Names([SITE], ["127.0.0.1"])

    async def main() -> None:
        async with site(ALLOWED, names) as (bird, fetcher, detour):
            bird.pages["/a?x=1"] = answer(PNG)
            assert await fetcher.fetch("https://img.test/a?x=1#part") == PNG
            detour_hosts = [
                (request.extensions["sni_hostname"], request.headers["host"]) for request in detour.requests
            ]
            assert detour_hosts == [("img.test", "img.test")] and names.asked == ["img.test"]
            head = bird.seen[0].lower()
            assert head.startswith("get /a?x=1 http/1.1") and "host: img.test\r\n" in head
            assert "accept-encoding: identity" in head and "connection: close" in head
            with pytest.raises(SourceRefused, match="not public"):
                await fetcher.fetch("https://img.test/a?x=1")
            assert len(bird.seen) == 1 and names.asked == ["img.test"] * 2

    run(main())


@pytest.mark.parametrize("answers", [[SITE, "10.0.0.1"], ["::1", SITE], ["::ffff:127.0.0.1"], ["fe80::1%lo"], ["x"]])
def test_one_inner_address_among_the_answers_is_enough_to_refuse(answers: list[str]) -> None:
    async def main() -> None:
        async with site(ALLOWED, Names(answers)) as (_, fetcher, detour):
            with pytest.raises(SourceRefused, match="not public"):
                await fetcher.fetch("http://img.test/a")
            assert detour.requests == []

    run(main())


@pytest.mark.parametrize("host", ["2130706433", "0x7f000001", "0x5d.0xb8.0xd8.0x22", "93.184.55330", "img.0", "0"])
def test_a_number_is_never_asked_of_a_name_server(host: str) -> None:
    """Not even when it is allowed and a name server would call it public: the system's resolver reads it otherwise."""
    names = Names()

    async def main() -> None:
        async with site(ImageLimits(allowed_media_domains=(host,)), names) as (_, fetcher, detour):
            with pytest.raises(SourceRefused, match="is a number"):
                await fetcher.fetch(f"http://{host}/a")
            assert names.asked == [] and detour.requests == []

    run(main())


def test_names_without_an_address() -> None:
    async def main() -> None:
        async with site(ALLOWED, Names([])) as (_, fetcher, _):
            with pytest.raises(SourceFailed, match="no address"):
                await fetcher.fetch("http://img.test/a")

    run(main())


def test_the_systems_resolver() -> None:
    async def main() -> None:
        assert set(await resolve_host("localhost", 80)) & {"127.0.0.1", "::1"}
        with pytest.raises(SourceFailed, match="not found"):
            await resolve_host("a..b", 80)
        fetcher = Fetcher(ImageLimits(allowed_media_domains=("localhost",)))
        with pytest.raises(SourceRefused, match="not public"):
            await fetcher.fetch("http://localhost/a")
        await fetcher.aclose()

    run(main())


# redirects


def test_redirects_are_followed_up_to_the_limit() -> None:
    async def main() -> None:
        async with site(ALLOWED) as (bird, fetcher, _):
            bird.pages |= {f"/{i}": moved(f"/{i + 1}", status) for i, status in enumerate((301, 302, 303, 307, 308))}
            bird.pages["/5"] = answer(PNG)
            assert await fetcher.fetch("http://img.test/2") == PNG
            assert [head.split()[1] for head in bird.seen] == ["/2", "/3", "/4", "/5"]
            assert not any("cookie" in head.lower() for head in bird.seen)
            bird.seen.clear()
            with pytest.raises(SourceRefused, match="more than 3 times"):
                await fetcher.fetch("http://img.test/1")
            assert len(bird.seen) == 4
            bird.pages["/loop"] = moved("http://img.test/loop")
            with pytest.raises(SourceRefused, match="more than 3 times"):
                await fetcher.fetch("http://img.test/loop")

    run(main())


@pytest.mark.parametrize(
    "target",
    [
        "http://127.0.0.1:{port}/secret", "http://localhost:{port}/secret", "//127.0.0.1:{port}/secret", "file:///etc/passwd",
        "data:image/png;base64,AAAA", "http://evil.test/", "http://img.test:{port}/secret", "http://inner.cdn.test/secret",
        "http://u:p@img.test/", "ftp://img.test/", "", "http://[::1]:{port}/secret", "\\\\127.0.0.1\\", "http://0x7f000001/",
    ],
)  # fmt: skip
def test_redirects_inside_are_refused(target: str) -> None:
    """The allowed host answers 302; `inner.cdn.test` is allowed too, but its address is not public."""
    names = Names([SITE], ["127.0.0.1"])

    async def main() -> None:
        async with site(ALLOWED, names) as (bird, fetcher, _):
            bird.pages["/a"] = moved(target.format(port=bird.port))
            bird.pages["/secret"] = answer(b"secret")
            with pytest.raises((SourceRefused, BadImageUrl)):
                await fetcher.fetch("http://img.test/a")
            assert [head.split()[1] for head in bird.seen] == ["/a"]

    run(main())


def test_redirects_do_not_leave_https() -> None:
    async def main() -> None:
        async with site(ALLOWED) as (bird, fetcher, _):
            bird.pages |= {"/a": moved("http://img.test/b"), "/b": answer(PNG)}
            with pytest.raises(SourceRefused, match="from https to http"):
                await fetcher.fetch("https://img.test/a")
            assert await fetcher.fetch("http://img.test/a") == PNG

    run(main())

"""Bar 3 of the image path: hundreds of odd, broken and malicious images through HTTP, in little time and memory, while
others' answers stay the same."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from server.app import create_app
from server.gateway_config import GatewayConfig
from server.images import ImagePipeline
from server.tiny_vlm import write_tiny_vlm
from tests.end_to_end.conftest import Server, run_server
from tests.end_to_end.hostile_images import BROKEN, ODD, SHORT, urls
from tests.end_to_end.neighbour import REST_SECONDS, Neighbour
from tests.end_to_end.raw_http import Exchange, exchange, run_all
from tests.server.exchange import call
from tests.server.fakes import MODEL, FakeEngine, LocalChecker
from tests.server.image_fakes import FAMILIES
from tests.vision.canary import SITE, Answer, Canary, answer, canary, moved, site
from tests.vision.pictures import data_url, noise, save
from tests.vision.test_source_policy import LOOPBACK
from vision.limits import ImageLimits

CHAT = "/v1/chat/completions"
MAX_SECONDS = 2.0
MAX_GROWTH = 100e6
TEXT = "What do you see? "


@contextmanager
def listening() -> Iterator[Canary]:
    """A canary on a thread of its own, as this machine's inside."""
    loop = asyncio.new_event_loop()
    born: list[Canary] = []
    ready, enough = threading.Event(), asyncio.Event()

    async def live() -> None:
        async with canary() as bird:
            born.append(bird)
            ready.set()
            await enough.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=[live()])
    thread.start()
    try:
        assert ready.wait(10)
        yield born[0]
    finally:
        loop.call_soon_threadsafe(enough.set)
        thread.join(10)
        loop.close()


@pytest.fixture(scope="module")
def bird() -> Iterator[Canary]:
    with listening() as bird:
        assert httpx.get(f"http://127.0.0.1:{bird.port}/").status_code == 404
        assert len(bird.seen) == 1, "it sees visitors"
        bird.seen.clear()
        yield bird


@pytest.fixture(scope="module")
def eyes(tmp_path_factory: pytest.TempPathFactory, bird: Canary) -> Iterator[Server]:
    """It allows every inner host by name and port: only the address stands between a URL and the canary."""
    folder = tmp_path_factory.mktemp("tiny-vlm")
    write_tiny_vlm(folder)
    names = [host.lower().strip(".") for host in LOOPBACK if not set("@%#") & set(host)]
    allowed = [f"--allowed-media-domains={name}:{bird.port}" for name in names]
    with run_server(*allowed, model=str(folder)) as running:
        yield running


def body_of(server: Server, url: str) -> bytes:
    content = [{"type": "text", "text": TEXT}, {"type": "image_url", "image_url": {"url": url}}]
    fields = {"max_tokens": 6, "temperature": 0, "return_token_ids": True, "ignore_eos": True}
    return json.dumps({"model": server.model, "messages": [{"role": "user", "content": content}], **fields}).encode()


class Client:
    """Asks and notes how long the slowest answer took."""

    def __init__(self, server: Server) -> None:
        self.server, self.slowest = server, 0.0

    def ask(self, url: str) -> tuple[int, Any]:
        """Status, and the answer's tokens or its error."""
        body, start = body_of(self.server, url), time.monotonic()
        headers = {"content-type": "application/json"}
        answer = self.server.http.post(CHAT, content=body, headers=headers)
        self.slowest = max(self.slowest, time.monotonic() - start)
        if answer.status_code == 200:
            return 200, tuple(answer.json()["choices"][0]["token_ids"])
        assert len(answer.content) < 1000, "no data is echoed"
        return answer.status_code, answer.json()["error"]


class ImageNeighbour:
    """Asks about the same picture, again and again, each time with a picture of its own before it."""

    def __init__(self, server: Server) -> None:
        self._client, self._stop = Client(server), threading.Event()
        self._url = data_url(save(Image.fromarray(noise(40, 40, seed=77)), "PNG"))
        self._expected = self._client.ask(self._url)
        self._pool = ThreadPoolExecutor(1)

    def _run(self) -> int:
        rounds = 0
        while not rounds or not self._stop.wait(REST_SECONDS / 10):  # a tiny model answers sooner
            assert self._client.ask(self._url) == self._expected
            rounds += 1
        return rounds

    def __enter__(self) -> None:
        self._rounds = self._pool.submit(self._run)

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        assert self._expected[0] == 200 and self._rounds.result(60) > 0
        self._pool.shutdown()


def peak_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


@contextmanager
def calm(server: Server, bird: Canary) -> Iterator[Client]:
    """Whatever is sent inside: quick answers, little memory, no visit to the inside, and neighbours as before."""
    api = server.children()["api"]
    client = Client(server)
    before = api.memory_info().rss
    with Neighbour(server), ImageNeighbour(server):
        yield client
    assert client.slowest < MAX_SECONDS
    assert peak_bytes(api.pid) - before < MAX_GROWTH
    assert bird.seen == []
    server.wait_for(server.is_idle, 10, "idleness")


def test_odd_files_show_what_they_hold(eyes: Server, bird: Canary) -> None:
    assert len(ODD) >= 30
    with calm(eyes, bird) as client:
        answers = {}
        for name, (file, picture) in ODD.items():
            answers[name] = client.ask(data_url(file))
            assert answers[name] == client.ask(data_url(save(picture, "PNG"))), name
    assert all(status == 200 for status, _ in answers.values()), answers
    assert len(set(answers.values())) > 10, "the answers tell the pictures apart"


def test_broken_files_are_refused(eyes: Server, bird: Canary) -> None:
    assert len(BROKEN) >= 60
    with calm(eyes, bird) as client:
        for name, file in BROKEN.items():
            status, error = client.ask(data_url(file))
            assert status in (400, 413) and error["code"] and error["param"] == "messages", f"{name}: {status} {error}"


@pytest.mark.parametrize("kind", SHORT)
def test_truncated_at_every_tenth_byte(eyes: Server, bird: Canary, kind: str) -> None:
    """Refused, or the whole picture, where only what follows it is cut."""
    file = SHORT[kind]
    with calm(eyes, bird) as client:
        whole = client.ask(data_url(file))
        found = [client.ask(data_url(file[:cut])) for cut in range(0, len(file), 10)]
    assert whole[0] == 200
    assert all(status == 400 or (status, answer) == whole for status, answer in found)
    assert sum(status == 400 for status, _ in found) >= len(found) - 1


def test_urls_never_reach_the_inside(eyes: Server, bird: Canary) -> None:
    with calm(eyes, bird) as client:
        for url in urls(bird.port):
            status, error = client.ask(url)
            assert status == 400 and error["param"] == "messages", f"{url[:80]}: {status} {error}"


async def _endless(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: image/png\r\n\r\n")
    for _ in range(40):
        writer.write(bytes(1 << 20))
        await writer.drain()


async def _drip(writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: image/png\r\n\r\n")
    for _ in range(1000):
        writer.write(b"\x89")
        await writer.drain()
        await asyncio.sleep(0.05)


PNG = save(Image.fromarray(noise(8, 8)), "PNG")
MISBEHAVIOUR: dict[str, bytes | Answer] = {
    "endless": _endless,
    "drip": _drip,
    "page": answer(PNG, kind="text/html"),
    "compressed": answer(PNG, extra="content-encoding: gzip\r\n"),
    "missing": answer(PNG, status="404 Not Found"),
    "half": answer(PNG)[:-30],
    "claims": b"HTTP/1.1 200 OK\r\ncontent-length: 314572800\r\n\r\n",
    "empty": answer(b""),
    "no HTTP": b"SSH-2.0-OpenSSH_9\r\n",
    "loop": moved("/loop"),
    "chain": moved("/chain/2"),
    "inside": moved("http://127.0.0.1:{port}/secret"),
    "inside by name": moved("http://localhost:{port}/secret"),
    "metadata": moved("http://169.254.169.254/latest/meta-data/"),
    "file": moved("file:///etc/passwd"),
    "bomb": answer(BROKEN["bomb of 16384"]),
    "SVG": answer(BROKEN["SVG that reads a file"], kind="image/svg+xml"),
}


def test_an_allowed_host_that_misbehaves() -> None:
    """In this process, where the host can have a public address; the whole gateway is between URL and answer."""
    limits = ImageLimits(allowed_media_domains=("img.test",), media_fetch_seconds=1.0)
    tokenizer, preprocessor = FAMILIES["llava"]

    async def main() -> None:
        async with site(limits) as (bird, fetcher, detour):
            for number in range(2, 9):
                bird.pages[f"/chain/{number}"] = moved(f"/chain/{number + 1}")
            pipeline = ImagePipeline(preprocessor, limits, fetcher=fetcher)
            app = create_app(GatewayConfig(), FakeEngine(), tokenizer, MODEL, LocalChecker(), pipeline)
            for name, page in MISBEHAVIOUR.items():
                path = "/" + name.replace(" ", "-")
                bird.pages[path] = page.replace(b"{port}", b"%d" % bird.port) if isinstance(page, bytes) else page
                part = {"type": "image_url", "image_url": {"url": f"http://img.test{path}"}}
                start = time.monotonic()
                body = {"model": MODEL, "messages": [{"role": "user", "content": [part]}]}
                found = await call(app, "POST", CHAT, body)
                assert found.status in (400, 413), f"{name}: {found.body!r}"
                assert found.error["code"] and time.monotonic() - start < MAX_SECONDS, name
            assert len([head for head in bird.seen if "/secret" in head]) == 0
            assert all(target.startswith(f"http://{SITE}/") for target in detour.targets)
            await pipeline.aclose()

    asyncio.run(asyncio.wait_for(main(), 30))


def test_clients_that_leave_with_their_pictures_leave_nothing(eyes: Server, bird: Canary) -> None:
    """300 requests, dropped while their pictures are read, decoded, waiting, encoded, or shown to a running model."""
    photo = save(Image.fromarray(noise(24, 32, seed=5)).resize((1280, 960)), "JPEG")
    small = [data_url(save(Image.fromarray(noise(30, 30, seed=seed)), "PNG")) for seed in range(20)]
    large = [data_url(photo + b"%d" % number, "jpeg") for number in range(100)]

    def dropped(number: int) -> Exchange:
        """After one or two events, or before any has come; every fifth has two photographs of its own."""
        kind = number % 5
        shown = large[number % 100 - 1 : number % 100 + 1] if kind == 4 else small[number % 17 : number % 17 + 3]
        parts = [{"type": "image_url", "image_url": {"url": url}} for url in shown]
        content = [{"type": "text", "text": f"{number} "}, *parts]
        return exchange(
            CHAT,
            (1, 2, 0, 0, 0)[kind],
            model=eyes.model,
            messages=[{"role": "user", "content": content}],
            stream=kind != 3,
            max_tokens=400,
            ignore_eos=True,
            n=1 + number % 2,
        )

    before, processes = eyes.metrics(), eyes.children().values()
    with calm(eyes, bird):
        run_all(eyes.url, [dropped(number) for number in range(100)], 60)
        held = [process.memory_info().rss for process in processes]
        for wave in range(1, 3):
            exchanges = [dropped(100 * wave + number) for number in range(100)]
            run_all(eyes.url, exchanges, 60)
            assert {entry.status for entry in exchanges} <= {0, 200}
    after = eyes.metrics()
    assert after["num_requests_running"] == after["num_requests_waiting"] == after["kv_cache_usage_perc"] == 0
    assert after["request_success_total:error"] == before["request_success_total:error"]
    assert after["request_success_total:abort"] > before["request_success_total:abort"]
    grown = [process.memory_info().rss - size for process, size in zip(processes, held, strict=True)]
    assert all(size < 30e6 for size in grown), grown

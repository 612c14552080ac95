"""data: URLs: every spelling of clients, what is wrong with the rest, and the limit of bytes."""

import base64
import time

import pytest

from tests.vision.pictures import FILES
from vision import source
from vision.errors import BadImageUrl, ImageTooLarge
from vision.limits import ImageLimits
from vision.source import decode_data_url, is_data_url

PNG = FILES["png"]
TEXT = base64.b64encode(PNG).decode()


@pytest.mark.parametrize(
    "url",
    [
        f"data:image/png;base64,{TEXT}",
        f"DATA:IMAGE/PNG;BASE64,{TEXT}",
        f" \n data:image/png;base64,{TEXT}\n",
        f"data:;base64,{TEXT}",
        f"data:image/png;charset=utf-8;name=a.png;base64,{TEXT}",
        f"data:image/jpeg; base64, {TEXT}",
        "data:image/png;base64," + "\r\n".join(TEXT[i : i + 76] for i in range(0, len(TEXT), 76)),
        *(f"data:image/png;base64,{TEXT[:7]}{space}{TEXT[7:]}" for space in " \t\r\n\f"),
        "data:image/png;base64," + TEXT.rstrip("="),
    ],
)
def test_data_urls_as_clients_write_them(url: str) -> None:
    assert is_data_url(url) and decode_data_url(url, ImageLimits()) == PNG


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("data:", "form data:image/png"),
        ("data:image/png;base64", "form data:image/png"),
        ("data:image/png;base64,", "no bytes"),
        ("data:image/png;base64,!!!!", "not valid base64"),
        ("data:image/png;base64,iVBO-_8=", "not valid base64"),
        ("data:image/png;base64,iVBO=AAA", "not valid base64"),
        ("data:image/png;base64,iVBOR", "not valid base64"),
        ("data:image/png;base64,iVBO\u00e9", "not valid base64"),
        ("data:image/png;base64,iVBO%2B==", "not valid base64"),
        ("data:image/png;base64,====", "not valid base64"),
        (f"data:text/html;base64,{TEXT}", "'text/html', which is not an image type"),
        (f"data:application/pdf;base64,{TEXT}", "not an image type"),
        (f"data:image/png,{TEXT}", "must be base64-encoded"),
        (f"data:image/png;base64;x,{TEXT}", "must be base64-encoded"),
        (f"data:image/{'x' * 5000};base64,{TEXT}", "form data:image/png"),
        (f"data:image/png{';a' * 50};base64,{TEXT}", "form data:image/png"),
    ],
)
def test_data_urls_that_are_wrong(url: str, said: str) -> None:
    with pytest.raises(BadImageUrl, match=said) as caught:
        decode_data_url(url, ImageLimits())
    assert len(str(caught.value)) < 250


def test_data_url_at_and_above_the_limit_of_bytes() -> None:
    url = f"data:image/png;base64,{TEXT}"
    assert decode_data_url(url, ImageLimits(max_image_bytes=len(PNG))) == PNG
    with pytest.raises(ImageTooLarge, match=f"more than {len(PNG) - 1} bytes"):
        decode_data_url(url, ImageLimits(max_image_bytes=len(PNG) - 1))
    start = time.process_time()
    with pytest.raises(ImageTooLarge, match="20971520 bytes"):
        decode_data_url("data:;base64," + "A" * 40_000_000, ImageLimits())
    assert time.process_time() - start < 0.5


def test_pieces_of_base64_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    for size in range(1, 40):
        data = PNG[:size]
        text = base64.b64encode(data).decode()
        spaced = " ".join(text)
        for piece in (1, 2, 3, 4, 5, 7, 8, 64):
            monkeypatch.setattr(source, "BASE64_PIECE", piece)
            for form in (text, text.rstrip("="), spaced, text + "\n" * 9):
                assert decode_data_url(f"data:;base64,{form}", ImageLimits()) == data
            for form in (f"AAA={text}", f"AA=={text}", f"{text}!"):
                with pytest.raises(BadImageUrl, match="not valid base64"):
                    decode_data_url(f"data:;base64,{form}", ImageLimits())

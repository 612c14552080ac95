"""Icons and fonts from npm packages, fetched once with `npm pack`, checked by hash, icons rendered to one array a
vendor. Called before pictures are made (`load_sprites`, `load_fonts`). Nothing is fetched that the folder has already.
"""

import hashlib
import io
import json
import subprocess
import tarfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFont

from vision.embedded.vocabulary import ICONS

SPRITE_SIDE = 128
TIMEOUT_S = 600

UInt8 = npt.NDArray[np.uint8]


class SourceError(Exception):
    """A package cannot be fetched, or is not the one that was pinned."""


@dataclass(frozen=True, slots=True)
class Package:
    """An npm package of one version."""

    name: str
    version: str
    sha256: str
    """Of the packed file."""

    @property
    def file(self) -> str:
        """As `npm pack` names it."""
        return f"{self.name.removeprefix('@').replace('/', '-')}-{self.version}.tgz"


@dataclass(frozen=True, slots=True)
class Fonts:
    """Faces for training, and those that only the evaluation sees."""

    train: tuple[bytes, ...]
    evaluation: tuple[bytes, ...]


VENDORS = {
    "noto": Package("@iconify-json/noto", "1.2.9", "3e918d88fc945c0bb3d468dbace6f88caef67f01c9f0e7bcae0915a042e8f1ad"),
    "fluent-emoji-flat": Package(
        "@iconify-json/fluent-emoji-flat", "1.2.6", "7d064769dee690815f823bc5bcc511d957198caf9f5edd8dd9c1aa48a6aeb175"
    ),
    "noto-v1": Package(
        "@iconify-json/noto-v1", "1.2.5", "2bf62c26c2c2884aa99e90aec942cdaee17a5921f05690694f4978ad4b017c37"
    ),
    "fluent-emoji": Package(
        "@iconify-json/fluent-emoji", "1.2.7", "8044210dbf11e016d4de85f15d01a243423bd832457e7e2491df1b751c0e272b"
    ),
    "twemoji": Package(
        "@iconify-json/twemoji", "1.2.5", "19046dff7d8707ce96212ec86468b36ac5f8e60409629dd13f809265c6d0ebb7"
    ),
}
EVALUATION_VENDOR = "twemoji"
"""CC-BY-4.0, never trained on."""
FONTS = {
    "roboto": Package(
        "@fontsource/roboto", "5.3.0", "77620f437249772e381698224ea1bddd01c985ecd60267a63ddc96b9eb9348f7"
    ),
    "open-sans": Package(
        "@fontsource/open-sans", "5.3.0", "95e6dd90f5860d0de22f791b6d802598743762c62e4894bfa26f80b1ea0cf3f5"
    ),
    "lora": Package("@fontsource/lora", "5.3.0", "3f2e66b0934b8652bb1a37645a9fc3e77e83b5841a09e97174e7bb11e11063c9"),
    "courier-prime": Package(
        "@fontsource/courier-prime", "5.3.0", "fd204a077d81426e1425baed6d471ad78a8eccca931091e661637bb10b5f2724"
    ),
    "nunito": Package(
        "@fontsource/nunito", "5.3.0", "4d8e1fb4f4a40c125c7a302b21e5c6810b86569b60bac0fa0405c04380f4c77b"
    ),
    "oswald": Package(
        "@fontsource/oswald", "5.3.0", "27bf46420288bb65bd186638cde54686aa8f9d5dc975b1d597dfe81a7dd472cb"
    ),
    "merriweather": Package(
        "@fontsource/merriweather", "5.3.0", "348f20a775e50a50b508ab6660771df6905ab2ea695c6c2a8df889c5cceec42f"
    ),
    "zilla-slab": Package(
        "@fontsource/zilla-slab", "5.3.0", "b7db2f40f3aaeb44c0e1dfe3da1e5de96d177a674ffe5e5e012c59b6a01e8aab"
    ),
    "rubik": Package("@fontsource/rubik", "5.3.0", "3f34e5588fcd07e01f1a5d667e5df1a6b287aeefba5b6e46f892131009a0db6a"),
    "roboto-mono": Package(
        "@fontsource/roboto-mono", "5.3.0", "9825f59e72dab7ef3f96e6af79407d97844ba50927ae57f2c9c60199daa9ef62"
    ),
    "overpass-mono": Package(
        "@fontsource/overpass-mono", "5.3.0", "3c72c65cd98f32ac25f5140edecce8241f096b0f3d0e28387958982befd0ba79"
    ),
    "anonymous-pro": Package(
        "@fontsource/anonymous-pro", "5.3.0", "946b468dd00419fa20c4c60d6be6d3ef254cbc54afbfae5290488d801d884df8"
    ),
    "source-code-pro": Package(
        "@fontsource/source-code-pro", "5.3.1", "52ff8925aa275d3d28b745760ab78e9ac11276a477c909f1a8e703e0902afcc4"
    ),
    "poppins": Package(
        "@fontsource/poppins", "5.3.0", "f4779bb12acaaa07dc7dd8da82ab0f61515fea2f30664535f7a249eeb0dd5bcf"
    ),
    "bitter": Package(
        "@fontsource/bitter", "5.3.0", "f907568dce71e70601cc2ef3ecd4f72d7721a12dad358d8fb4b58ffb55a72efb"
    ),
    "inconsolata": Package(
        "@fontsource/inconsolata", "5.3.0", "d34e446cb20ca819c3bc2795ff7dd1f071a4a7a6f8a38518af3b47144b5e06d9"
    ),
}
EVALUATION_FONTS = ("poppins", "bitter", "inconsolata")
WEIGHTS = (400, 700)


def fetch(package: Package, folder: Path) -> Path:
    """The packed file. Raises SourceError."""
    path = folder / package.file
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        command = ["npm", "pack", f"{package.name}@{package.version}", "--pack-destination", str(folder), "--silent"]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S)
        except FileNotFoundError:
            raise SourceError("npm is not installed; it fetches the icons and the fonts") from None
        except subprocess.SubprocessError as error:
            raise SourceError(f"{' '.join(command)} failed: {error}") from None
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != package.sha256:
        raise SourceError(f"{path} has the SHA-256 {found}, not {package.sha256}; remove it and try again")
    return path


def _member(path: Path, member: str) -> bytes:
    with tarfile.open(path) as archive:
        file = archive.extractfile(f"package/{member}")
        if file is None:
            raise SourceError(f"{path} has no {member}")
        return file.read()


def _render(svg: str) -> UInt8:
    """RGBA [side, side, 4], in the middle where an icon is not square."""
    try:
        import resvg_py
    except ImportError:
        raise SourceError("resvg-py draws the icons; install it with `pip install 'firstlight[train]'`") from None
    png = bytes(resvg_py.svg_to_bytes(svg_string=svg, width=SPRITE_SIDE, height=SPRITE_SIDE, skip_system_fonts=True))
    drawn = Image.open(io.BytesIO(png)).convert("RGBA")
    square = Image.new("RGBA", (SPRITE_SIDE, SPRITE_SIDE))
    square.paste(drawn, ((SPRITE_SIDE - drawn.width) // 2, (SPRITE_SIDE - drawn.height) // 2))
    return np.asarray(square)


def _svg(icon: dict[str, object], sides: tuple[object, object]) -> str:
    width, height = icon.get("width", sides[0]), icon.get("height", sides[1])
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">{icon["body"]}</svg>'


def load_sprites(folder: Path, vendor: str) -> UInt8:
    """uint8 [icons, side, side, 4], in the order of the vocabulary; rendered at the first call. Raises SourceError.

    An icon that the vendor has not got is transparent.
    """
    package = VENDORS[vendor]
    names = hashlib.sha256(" ".join(ICONS.values()).encode()).hexdigest()[:12]
    cache = folder / f"{vendor}-{package.version}-{SPRITE_SIDE}-{names}.npy"
    if not cache.is_file():
        data = json.loads(_member(fetch(package, folder), "icons.json"))
        sides = data.get("width", 16), data.get("height", 16)
        nothing = np.zeros((SPRITE_SIDE, SPRITE_SIDE, 4), dtype=np.uint8)
        icons = data["icons"]
        sprites = np.stack([_render(_svg(icons[name], sides)) if name in icons else nothing for name in ICONS.values()])
        partial = cache.with_suffix(".part.npy")
        np.save(partial, sprites)
        partial.replace(cache)
    found: UInt8 = np.load(cache, mmap_mode="r")
    assert found.shape == (len(ICONS), SPRITE_SIDE, SPRITE_SIDE, 4), found.shape
    return found


def load_fonts(folder: Path) -> Fonts:
    """The files of all faces. Raises SourceError."""
    faces = {
        name: tuple(_member(fetch(package, folder), f"files/{name}-latin-{weight}-normal.woff") for weight in WEIGHTS)
        for name, package in FONTS.items()
    }
    train = [face for name, both in faces.items() if name not in EVALUATION_FONTS for face in both]
    return Fonts(tuple(train), tuple(face for name in EVALUATION_FONTS for face in faces[name]))


def open_font(face: bytes, size: int) -> ImageFont.FreeTypeFont:
    """A face in pixels."""
    return ImageFont.truetype(io.BytesIO(face), size)

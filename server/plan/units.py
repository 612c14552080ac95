"""Numbers for people. Used by the files of `server/plan`."""

UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def size(number: float) -> str:
    """Bytes, to three or four digits."""
    for factor, unit in UNITS:
        if number >= factor:
            return f"{number / factor:.{1 if number < 1000 * factor else 0}f} {unit}"
    return f"{number:.0f} B"


def count(number: float) -> str:
    """Of parameters or tokens."""
    for factor, unit in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if number >= factor:
            return f"{number / factor:.{2 if number < 10 * factor else 1}f}{unit}"
    return f"{number:.0f}" if number >= 10 else f"{number:.2g}"

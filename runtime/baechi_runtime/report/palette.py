"""One colour for each device, the same in every page and plot; a device's name always stands beside it."""

DEVICES = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#882255")
"""Told apart with any colour vision: M. Okabe and K. Ito, Color Universal Design (2008). Pages may be dark, so wine,
from P. Tol, Colour Schemes (2021), stands for black."""
LIMIT = "#d55e00"
"""A memory limit, which is drawn dashed: a device has this colour, too."""
_DARK, _LIGHT = "#111111", "#ffffff"


def device_colour(device: int) -> str:
    """#rrggbb of the device at that position; from the ninth on colours come again."""
    return DEVICES[device % len(DEVICES)]


def text_colour(background: str) -> str:
    """Black or white, whichever is read more easily on #rrggbb (WCAG 2.2, contrast ratio)."""
    luminance = _luminance(background)
    return _DARK if (luminance + 0.05) / (_luminance(_DARK) + 0.05) > (_luminance(_LIGHT) + 0.05) / (luminance + 0.05) else _LIGHT


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

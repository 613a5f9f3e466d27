"""The style sheet by itself: can its texts be read on their backgrounds?"""

import re
from pathlib import Path

import pytest

from redco_flow.report import page

TEXTS = ["text", "muted", "link", "good", "bad", "wait", "c1", "c2", "c3", "c4", "c5", "c6"]


def themes() -> dict[str, dict[str, str]]:
    css = (Path(page.__file__).parent / "templates" / "style.css").read_text()
    light, dark = re.findall(r":root \{(.*?)\}", css, re.DOTALL)[:2]
    return {
        name: dict(re.findall(r"--([\w-]+): (#\w{6})", text))
        for name, text in (("light", light), ("dark", dark))
    }


def luminance(colour: str) -> float:
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_text_has_the_contrast_that_wcag_asks_for(theme):
    colours = themes()[theme]
    pairs = [(text, back) for text in TEXTS for back in ("card", "page")]
    pairs += [("text", "sunk"), ("muted", "sunk"), ("muted", "quiet-back")]
    pairs += [(state, f"{state}-back") for state in ("good", "bad", "wait")]

    low = {pair: contrast(*(colours[name] for name in pair)) for pair in pairs}

    assert {pair: ratio for pair, ratio in low.items() if ratio < 4.5} == {}  # WCAG 2.2, 1.4.3 AA


def test_both_themes_define_the_same_colours():
    assert themes()["light"].keys() == themes()["dark"].keys()

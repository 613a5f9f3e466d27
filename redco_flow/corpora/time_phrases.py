"""Phrases for times and amounts by humanize, in sixteen languages of nine scripts.

    vor 3 Tagen; 2 Jahre, 5 Monate und 12 Tage; 1,4 Millionen
    3日前; 2年, 5ヶ月, 12日; 1.4 百万

A small multilingual text: its words are those of humanize's translators, its numbers are drawn. All
languages say the same things. humanize comes with Orbax and Prefect.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path

import humanize

LANGUAGES = {
    "ar": "ar", "bn": "bn_BD", "de": "de_DE", "el": "el_GR", "es": "es_ES", "fi": "fi_FI",
    "fr": "fr_FR", "hu": "hu_HU", "ja": "ja_JP", "ko": "ko_KR", "pl": "pl_PL", "ru": "ru_RU",
    "si": "si_LK", "tr": "tr_TR", "vi": "vi_VN", "zh": "zh_CN",
}  # fmt: skip
"""humanize's name of each language."""

_ROWS_OF_EACH = 400
_MOST_DAYS = 2000
_SECONDS_OF_DAY = 86_400
_LARGEST_EXPONENT = 11.0  # of an amount's power of 10


def files() -> list[Path]:
    """The translations, in order of name."""
    root = Path(humanize.__file__).parent / "locale"
    return sorted(root / name / "LC_MESSAGES" / "humanize.mo" for name in LANGUAGES.values())


def identity() -> dict[str, str]:
    """The version whose rules put the words together."""
    return {"humanize": version("humanize")}


def rows(paths: Iterable[Path]) -> Iterator[dict[str, str]]:
    """Yield {"language", "text"}, as many of each language, the same things in the same order."""
    names = {path.parent.parent.name for path in paths}
    spoken = {code: name for code, name in LANGUAGES.items() if name in names}
    drawn = random.Random(0)  # noqa: S311 (no secret)
    things = [_thing(drawn) for _ in range(_ROWS_OF_EACH)]
    for code, name in spoken.items():
        humanize.i18n.activate(name)
        try:
            texts = [_said(*thing) for thing in things]
        finally:
            humanize.i18n.deactivate()
        for text in dict.fromkeys(texts):
            yield {"language": code, "text": text}


def _thing(drawn: random.Random) -> Sequence[float]:
    """Draw days that have passed, a span in days, and an amount."""
    ago, span = (_MOST_DAYS ** drawn.random() for _ in range(2))
    return (ago, span, 10 ** drawn.uniform(3, _LARGEST_EXPONENT))


def _said(ago: float, span: float, amount: float) -> str:
    spans = [timedelta(seconds=round(days * _SECONDS_OF_DAY)) for days in (ago, span)]
    return "; ".join(
        (
            humanize.naturaltime(spans[0]),
            humanize.precisedelta(spans[1], minimum_unit="minutes", format="%d"),
            humanize.intword(round(amount)),
        )
    )

"""BLEU-4 with any number of references per example, in percent.

Source: sacrebleu with its defaults (tokenizer 13a, exponential smoothing, case kept);
`metric_settings: {bleu: {tokenize: zh, lowercase: true}}` changes them. The score of a set pools
n-gram counts; it is not the mean of the examples' scores, which use the effective n-gram order so
that short texts can reach 100.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from redco_flow.metrics.tokenizers import SacreBleuTokenizer, find_tokenizer, spaces_warning
from redco_flow.spec.metric import check_pairs

KEYS = {"bleu": "max"}
_MAX_ORDER = 4


@dataclass(frozen=True)
class Settings:
    """Settings of `bleu`.

    Args:
        tokenize: one of sacreBLEU's tokenizers: `zh` for Chinese, `ja-mecab` for Japanese, `char`
            for characters, `intl`, `flores200` for many languages, `13a` for what has spaces.
        lowercase: compare in lower case.
    """

    tokenize: SacreBleuTokenizer = "13a"
    lowercase: bool = False


_DEFAULTS = Settings()


def compute(
    predictions: Sequence[str],
    references: Sequence[Sequence[str]],
    *,
    settings: Settings = _DEFAULTS,
) -> dict[str, float]:
    """Return corpus BLEU."""
    rows = statistics(predictions, references, settings=settings)
    return from_statistics([sum(column) for column in zip(*rows, strict=True)])


def per_example(
    predictions: Sequence[str],
    references: Sequence[Sequence[str]],
    *,
    settings: Settings = _DEFAULTS,
) -> dict[str, list[float]]:
    """Return each example's sentence BLEU (effective order)."""
    return {"bleu": [_percent(score) for score in _sentences(predictions, references, settings)]}


def statistics(
    predictions: Sequence[str],
    references: Sequence[Sequence[str]],
    *,
    settings: Settings = _DEFAULTS,
) -> list[list[float]]:
    """Return per example: matched n-grams (4), predicted n-grams (4), both lengths."""
    return [
        [float(count) for count in (*score.counts, *score.totals, score.sys_len, score.ref_len)]
        for score in _sentences(predictions, references, settings)
    ]


def from_statistics(totals: Sequence[float]) -> dict[str, float]:
    """Return corpus BLEU from the sum of the examples' statistics."""
    from sacrebleu.metrics.bleu import BLEU

    *counts, length, reference_length = [int(total) for total in totals]
    score = BLEU.compute_bleu(
        counts[:_MAX_ORDER], counts[_MAX_ORDER:], length, reference_length, smooth_method="exp"
    )
    return {"bleu": _percent(score)}


def check_settings(settings: Settings) -> None:
    """Refuse a tokenizer that cannot be used here.

    Raises:
        ValueError: what is missing.
    """
    find_tokenizer(settings.tokenize)


def describe_settings(settings: Settings) -> dict[str, Any]:
    """Return the tokenizer and whether case counts."""
    return asdict(settings)


def find_warnings(
    references: Sequence[Sequence[str]], *, settings: Settings = _DEFAULTS
) -> list[str]:
    """Return a warning where most references are not split into words."""
    return list(spaces_warning("bleu", settings.tokenize, references))


def _percent(score: Any) -> float:
    # sacrebleu's logarithms give 100.00000000000004 for a perfect text.
    return min(float(score.score), 100.0)


def _sentences(
    predictions: Sequence[str], references: Sequence[Sequence[str]], settings: Settings
) -> list[Any]:
    from sacrebleu.metrics.bleu import BLEU

    check_pairs(predictions, references)
    scorer = BLEU(effective_order=True, tokenize=settings.tokenize, lowercase=settings.lowercase)
    return [
        scorer.sentence_score(prediction, list(texts))
        for prediction, texts in zip(predictions, references, strict=True)
    ]

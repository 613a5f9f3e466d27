"""ROUGE-1, ROUGE-2, ROUGE-L and ROUGE-Lsum F-measures, in percent.

Source: google-research `rouge_score`, which summarisation papers report, with stemming. With
several references the best one counts, per score. By default tokens are runs of [a-z0-9];
`metric_settings: {rouge: {tokenize: zh}}` takes one of sacreBLEU's tokenizers instead. ROUGE-Lsum
compares line by line, as the summary-level ROUGE-L of multi-sentence summaries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from redco_flow.metrics.tokenizers import (
    SacreBleuTokenizer,
    find_tokenizer,
    spaces_warning,
    unsuited_share,
)
from redco_flow.spec.metric import check_pairs

KEYS = {"rouge1": "max", "rouge2": "max", "rougeL": "max", "rougeLsum": "max"}


@dataclass(frozen=True)
class Settings:
    """Settings of `rouge`.

    Args:
        tokenize: `latin` is rouge_score's own (runs of [a-z0-9]); the others are sacreBLEU's.
        use_stemmer: Porter's stemmer for English words of more than three letters.
    """

    tokenize: Literal["latin"] | SacreBleuTokenizer = "latin"
    use_stemmer: bool = True


_DEFAULTS = Settings()


def compute(
    predictions: Sequence[str],
    references: Sequence[Sequence[str]],
    *,
    settings: Settings = _DEFAULTS,
) -> dict[str, float]:
    """Return the mean F-measure of each ROUGE over all examples."""
    scores = per_example(predictions, references, settings=settings)
    return {key: sum(values) / len(values) for key, values in scores.items()}


def per_example(
    predictions: Sequence[str],
    references: Sequence[Sequence[str]],
    *,
    settings: Settings = _DEFAULTS,
) -> dict[str, list[float]]:
    """Return each example's F-measures against its best reference."""
    from rouge_score.rouge_scorer import RougeScorer

    check_pairs(predictions, references)
    scorer = RougeScorer(list(KEYS), tokenizer=_tokenizer(settings))
    scores: dict[str, list[float]] = {key: [] for key in KEYS}
    for prediction, texts in zip(predictions, references, strict=True):
        best = scorer.score_multi(list(texts), prediction)
        for key in KEYS:
            scores[key].append(100.0 * float(best[key].fmeasure))
    return scores


def check_settings(settings: Settings) -> None:
    """Refuse a tokenizer that cannot be used here.

    Raises:
        ValueError: what is missing.
    """
    _tokenizer(settings)


def describe_settings(settings: Settings) -> dict[str, Any]:
    """Return the tokenizer and whether words are stemmed."""
    return asdict(settings)


def find_warnings(
    references: Sequence[Sequence[str]], *, settings: Settings = _DEFAULTS
) -> list[str]:
    """Return a warning where most references give no tokens, or one for a sentence."""
    if settings.tokenize != "latin":
        return list(spaces_warning("rouge", settings.tokenize, references))
    tokenizer = _tokenizer(settings)
    share = unsuited_share(references, lambda text: not tokenizer.tokenize(text))
    if share <= 0.5:
        return []
    return [
        f"rouge: {share:.0%} of the references have no token of [a-z0-9], so their scores are 0. "
        "Add `metric_settings: {rouge: {tokenize: intl}}`, or zh, ja-mecab or char for a script "
        "without spaces, next to the metrics."
    ]


class _SacreBleuTokens:
    """One of sacreBLEU's tokenizers as `rouge_score` calls one."""

    def __init__(self, settings: Settings) -> None:
        from nltk.stem.porter import PorterStemmer

        self._split = find_tokenizer(settings.tokenize)  # type: ignore[arg-type]
        self._stemmer = PorterStemmer() if settings.use_stemmer else None

    def tokenize(self, text: str) -> list[str]:
        """Return the tokens of a text in lower case, stemmed as `rouge_score` does."""
        tokens = self._split(text.lower()).split()
        if self._stemmer is None:
            return tokens
        return [self._stemmer.stem(one) if len(one) > 3 else one for one in tokens]


def _tokenizer(settings: Settings) -> Any:
    from rouge_score.tokenizers import DefaultTokenizer

    if settings.tokenize == "latin":
        return DefaultTokenizer(settings.use_stemmer)
    return _SacreBleuTokens(settings)

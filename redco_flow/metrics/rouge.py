"""ROUGE-1, ROUGE-2, ROUGE-L and ROUGE-Lsum F-measures, in percent.

Source: C.-Y. Lin, "ROUGE: a package for automatic evaluation of summaries" (2004). The scores are
those of google-research's `rouge_score` with stemming, which summarization papers report. With
several references the best one counts, per score. By default tokens are runs of [a-z0-9];
`metric_settings: {rouge: {tokenize: zh}}` takes one of sacreBLEU's tokenizers instead. ROUGE-Lsum
compares line by line, as the summary-level ROUGE-L of multi-sentence summaries.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from redco_flow.metrics.porter_stemmer import stem
from redco_flow.metrics.tokenizers import (
    SacreBleuTokenizer,
    find_tokenizer,
    spaces_warning,
    unsuited_share,
)
from redco_flow.spec.metric import check_pairs

Tokens = Sequence[str]

KEYS = {"rouge1": "max", "rouge2": "max", "rougeL": "max", "rougeLsum": "max"}


@dataclass(frozen=True)
class Settings:
    """Settings of `rouge`.

    Args:
        tokenize: `latin` is `rouge_score`'s (runs of [a-z0-9]); the others are sacreBLEU's.
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
    check_pairs(predictions, references)
    tokenize = _tokenizer(settings)
    scores: dict[str, list[float]] = {key: [] for key in KEYS}
    for prediction, texts in zip(predictions, references, strict=True):
        found = [_score_pair(prediction, text, tokenize) for text in texts]
        for key in KEYS:
            scores[key].append(100.0 * max(one[key] for one in found))
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
    tokenize = _tokenizer(settings)
    share = unsuited_share(references, lambda text: not tokenize(text))
    if share <= 0.5:
        return []
    return [
        f"rouge: {share:.0%} of the references have no token of [a-z0-9], so their scores are 0. "
        "Add `metric_settings: {rouge: {tokenize: intl}}`, or zh, ja-mecab or char for a script "
        "without spaces, next to the metrics."
    ]


def _tokenizer(settings: Settings) -> Callable[[str], list[str]]:
    if settings.tokenize == "latin":
        split: Callable[[str], list[str]] = re.compile("[a-z0-9]+").findall
    else:
        to_tokens = find_tokenizer(settings.tokenize)

        def split(text: str) -> list[str]:
            return to_tokens(text).split()

    def tokenize(text: str) -> list[str]:
        tokens = split(text.lower())
        if not settings.use_stemmer:
            return tokens
        return [stem(token) if len(token) > 3 else token for token in tokens]

    return tokenize


def _score_pair(
    prediction: str, reference: str, tokenize: Callable[[str], list[str]]
) -> dict[str, float]:
    """Return the F-measure, from 0 to 1, of each key."""
    found, wanted = tokenize(prediction), tokenize(reference)
    lines = [[tokenize(line) for line in text.split("\n")] for text in (prediction, reference)]
    num_common = len(_common_subsequence(wanted, found))
    return {
        "rouge1": _score_ngrams(found, wanted, 1),
        "rouge2": _score_ngrams(found, wanted, 2),
        "rougeL": _f_measure(num_common, len(found), len(wanted)),
        "rougeLsum": _score_lines(*lines),
    }


def _f_measure(num_common: int, num_found: int, num_wanted: int) -> float:
    if not num_common:
        return 0.0
    precision, recall = num_common / num_found, num_common / num_wanted
    return 2 * precision * recall / (precision + recall)


def _score_ngrams(found: Tokens, wanted: Tokens, size: int) -> float:
    in_found, in_wanted = (
        Counter(zip(*(tokens[start:] for start in range(size)), strict=False))
        for tokens in (found, wanted)
    )
    return _f_measure((in_found & in_wanted).total(), in_found.total(), in_wanted.total())


def _score_lines(found: Sequence[Tokens], wanted: Sequence[Tokens]) -> float:
    """Return the summary-level ROUGE-L: the union LCS of each wanted line with all found lines.

    As in ROUGE-1.5.5 a token counts at most as often as the found lines have it.
    """
    in_found = Counter(token for line in found for token in line)
    in_unions: Counter[str] = Counter()
    for line in wanted:
        positions = {one for other in found for one in _common_subsequence(line, other)}
        in_unions.update(line[position] for position in positions)
    num_common = (in_unions & in_found).total()
    return _f_measure(num_common, in_found.total(), sum(map(len, wanted)))


def _common_subsequence(wanted: Tokens, found: Tokens) -> list[int]:
    """Return the positions in `wanted` of a longest common subsequence, last first.

    Of several, the one that `rouge_score` chooses: ROUGE-Lsum depends on the choice.
    """
    rows = _subsequence_lengths(wanted, found)
    positions = []
    i, j = len(wanted), len(found)
    while i > 0 and j > 0:
        if wanted[i - 1] == found[j - 1]:
            positions.append(i - 1)
            i, j = i - 1, j - 1
        elif _num_zeros(rows[j - 1], i) > _num_zeros(rows[j], i - 1):
            j -= 1
        else:
            i -= 1
    return positions


def _subsequence_lengths(wanted: Tokens, found: Tokens) -> list[int]:
    """Return the table of LCS lengths, each row as the bits of an integer.

    The zeros among the lowest i bits of row j are the LCS length of `wanted[:i]` and `found[:j]`.
    Source: H. Hyyrö, "Bit-parallel LCS-length computation revisited" (2004).
    """
    matches: dict[str, int] = {}
    for position, token in enumerate(wanted):
        matches[token] = matches.get(token, 0) | 1 << position
    all_bits = (1 << len(wanted)) - 1
    rows = [all_bits]
    for token in found:
        common = rows[-1] & matches.get(token, 0)
        rows.append((rows[-1] + common | rows[-1] - common) & all_bits)
    return rows


def _num_zeros(row: int, width: int) -> int:
    return width - (row & ((1 << width) - 1)).bit_count()

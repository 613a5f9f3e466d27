"""sacreBLEU's tokenizers by their names, and whether a tokenizer suits the script of a text.

Chinese, Japanese, Thai, Lao, Khmer and Burmese are written without spaces: a tokenizer that splits
at spaces makes one token of a sentence, or none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal

SacreBleuTokenizer = Literal[
    "13a", "intl", "zh", "ja-mecab", "ko-mecab", "char", "flores101", "flores200", "none"
]
"""Names of sacreBLEU's tokenizers."""

# Han with its extensions, kana, Thai, Lao, Burmese, Khmer.
_NO_SPACES = re.compile(
    "[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"
    "\U00020000-\U0003ffff]"
)
_SUITS_NO_SPACES = ("zh", "ja-mecab", "char", "flores101", "flores200")
_PACKAGES = {"ja-mecab": "sacrebleu[ja]", "ko-mecab": "sacrebleu[ko]"}
_SENTENCE_PIECES = ("flores101", "flores200")


def find_tokenizer(name: SacreBleuTokenizer) -> Callable[[str], str]:
    """Return sacreBLEU's tokenizer: text -> its tokens, separated by spaces.

    Raises:
        ValueError: a package that it needs is missing, or the file of its model, which sacreBLEU
            would download without a limit.
    """
    if name in _SENTENCE_PIECES and not (file := _model_file(name)).is_file():
        raise ValueError(
            f"sacreBLEU's tokenizer '{name}' needs {file}: once, where there is a network, run "
            f"`pip install sentencepiece` and `echo a | sacrebleu -tok {name} /dev/null`."
        )
    from sacrebleu.metrics.bleu import BLEU

    try:
        tokenizer: Callable[[str], str] = BLEU(tokenize=name).tokenizer
    except (RuntimeError, ImportError, AssertionError) as error:
        package = _PACKAGES.get(name, "sentencepiece")
        raise ValueError(
            f"sacreBLEU's tokenizer '{name}' needs more packages: pip install '{package}'."
        ) from error
    return tokenizer


def _model_file(name: str) -> Path:
    from sacrebleu.tokenizers.tokenizer_spm import SPM_MODELS
    from sacrebleu.utils import SACREBLEU_DIR

    return Path(SACREBLEU_DIR) / "models" / Path(SPM_MODELS[name]["url"]).name


def unsuited_share(
    references: Sequence[Sequence[str]], is_unsuited: Callable[[str], bool]
) -> float:
    """Return the share of examples of whose references each one is unsuited; 0 of no examples."""
    found = [all(map(is_unsuited, texts)) for texts in references]
    return sum(found) / len(found) if found else 0.0


def has_no_spaces(text: str) -> bool:
    """Whether most letters of a text are of a script that is written without spaces."""
    letters = sum(map(str.isalpha, text))
    return letters > 0 and len(_NO_SPACES.findall(text)) > letters / 2


def spaces_warning(
    metric: str, tokenize: str, references: Sequence[Sequence[str]]
) -> Iterable[str]:
    """Yield a warning where a metric splits most references at spaces that they do not have."""
    if tokenize in _SUITS_NO_SPACES:
        return
    share = unsuited_share(references, has_no_spaces)
    if share > 0.5:
        yield (
            f"{metric}: {share:.0%} of the references are in a script without spaces, which the "
            f"tokenizer '{tokenize}' does not split into words, so the scores mean little. "
            f"Add `metric_settings: {{{metric}: {{tokenize: zh}}}}`, or char, ja-mecab or "
            "flores200, next to the metrics."
        )

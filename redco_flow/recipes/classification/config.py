"""Settings and encoding of the classification recipe: one text or two to token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from redco_flow.models.find import DECODERS, ENCODERS
from redco_flow.recipes.recipe import CLASSES
from redco_flow.text.pairs import EncodedPairs, TruncationSide, encode_in_template
from redco_flow.text.tokenizer import TextTokenizer

FAMILIES = (*ENCODERS, *DECODERS)
DEFAULT_FAMILY = "bert"
TARGETS = CLASSES
TAKES_PAIRS = True


@dataclass(frozen=True)
class Settings:
    """Keys of the pipeline's `settings`.

    Args:
        classes: their names, of which the first is number 0; where there are none those of the
            data's own, or of the training data, sorted.
    """

    classes: list[str | int] = field(default_factory=list)


def encode(
    sources: Sequence[str],
    _targets: Sequence[str],
    tokenizer: TextTokenizer,
    *,
    source_prefix: str,
    source_suffix: str,
    max_source_length: int,
    max_target_length: int,
    truncation_side: TruncationSide = "right",
) -> EncodedPairs:
    """Encode one text, or two, in the tokenizer's template; a second text's are target ids.

    Args:
        source_prefix, source_suffix: before the first text, and behind the last one.
        max_source_length: of both texts together, with the template's tokens.
        truncation_side: which end of each text is cut off.
    """
    prefixed = [source_prefix + source for source in sources]
    return encode_in_template(
        prefixed, tokenizer, max_source_length, source_suffix, truncation_side=truncation_side
    )

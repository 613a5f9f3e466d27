"""A model's generation_config.json: the end tokens and forced tokens that config.json may lack.

Of published models with a chat template it often names more end tokens than config.json does.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from redco_flow.engine.files import UnreadableFile, read_json, reading
from redco_flow.models.hub.model_files import GENERATION_FILE

_END = "eos_token_id"
# Other keys that decide which tokens a text has; here they count before config.json's.
_TOKENS = ("decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id")


def with_generation_config(values: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Return a `config.json`'s content with what `generation_config.json` says of tokens.

    A text ends at each end token that either file names.

    Raises:
        UnreadableFile: the file is not a JSON object.
    """
    path = directory / GENERATION_FILE
    if not path.is_file():
        return dict(values)
    with reading(path, "a generation configuration"):
        generation = read_json(path)
    if not isinstance(generation, dict):
        raise UnreadableFile(
            f"{path}: not a generation configuration: a {type(generation).__name__}."
        )
    tokens = {key: generation[key] for key in _TOKENS if generation.get(key) is not None}
    ends = [*_listed(values.get(_END)), *_listed(generation.get(_END))]
    if ends:
        tokens[_END] = [end for place, end in enumerate(ends) if end not in ends[:place]]
    return {**values, **tokens}


def _listed(tokens: Any) -> list[Any]:
    """Return one token, several or none as a list; what they are is checked with the config."""
    if tokens is None:
        return []
    return list(tokens) if isinstance(tokens, list) else [tokens]

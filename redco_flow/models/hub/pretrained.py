"""Models as directories: configurations beside safetensors, as on the Hugging Face hub.

Knows which files a model consists of and puts family, config and tensors together.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax

from redco_flow.engine.files import UnreadableFile, read_json, reading, write_json
from redco_flow.models.family import ModelFamily
from redco_flow.models.find import find_model
from redco_flow.models.hub.model_files import (
    CONFIG_FILE,
    GENERATION_FILE,
    quantization_method,
    quantization_problem,
    weight_files,
)
from redco_flow.models.hub.tensors import (
    CheckpointMismatch,
    TensorFiles,
    load_params,
    save_params,
)


def model_type(directory: Path) -> str:
    """Return the family that a model's `config.json` says it is of; empty where it does not."""
    return str(_read_config(directory).get("model_type", "")).replace("-", "_")


def read_model(
    directory: Path,
    *,
    family: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    dtype: str = "float32",
) -> tuple[ModelFamily[Any], Any]:
    """Return the family's functions and the config of the model in a directory.

    Args:
        family: by `config.json`'s model_type where None.
        overrides: config values to use instead of the file's.
        dtype: what products are computed in.

    Raises:
        ValueError: an unknown family, key or value.
    """
    values = with_generation_config(_read_config(directory), directory)
    path = directory / CONFIG_FILE
    with reading(path, "a model's configuration"):
        model = find_model(family or str(values.get("model_type", "")))
        config = model.Config.from_hugging_face(values, dtype=dtype)
    config = config.updated(overrides or {})
    if weight_files(directory):
        with TensorFiles(directory) as files:
            config = model.config_of_tensors(config, files)
    return model, config


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG_FILE
    with reading(path, "a model's configuration"):
        values = read_json(path)
    if not isinstance(values, dict):
        raise UnreadableFile(f"{path}: not a model's configuration: a {type(values).__name__}.")
    return values


def load_pretrained(
    directory: Path,
    model: ModelFamily[Any],
    config: Any,
    shardings: Any = None,
    *,
    drawn: Collection[str] = (),
) -> Any:
    """Read a model's parameters, each device's shard straight from the file.

    Args:
        shardings: tree of `jax.sharding.Sharding` like the parameters; None: the default device.
        drawn: names at the top of the parameters' tree that are not read but drawn, by one key
            for all: a new head.

    Raises:
        CheckpointMismatch: missing, unexpected or mis-shaped tensors, all of them named.
    """
    if method := quantization_method(_read_config(directory)):
        raise CheckpointMismatch(f"{directory}: the model {quantization_problem(method)}")
    layouts = model.tensor_layouts(config)
    read = [
        {name: part for name, part in tree.items() if name not in drawn} if tree else None
        for tree in (layouts, model.abstract_params(config), shardings)
    ]
    replaced = [
        name
        for part in drawn
        for layout in jax.tree.leaves(layouts[part])
        for name in (layout.name, *layout.aliases)
    ]
    params = load_params(directory, *read, ignored=[*model.IGNORED_TENSORS, *replaced])
    if not drawn:
        return params
    wanted = None if shardings is None else {name: shardings[name] for name in drawn}
    draw = jax.jit(lambda key: _parts(model.init_params(config, key), drawn), out_shardings=wanted)
    return {**params, **draw(jax.random.key(0))}


def _parts(params: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: params[name] for name in names}


def save_pretrained(directory: Path, model: Any, config: Any, params: Any) -> None:
    """Write what transformers' `from_pretrained` reads: tensors, then `config.json`.

    Args:
        model: a `ModelFamily`, or `models.classifier` with its config.
    """
    directory.mkdir(parents=True, exist_ok=True)
    save_params(directory, model.tensor_layouts(config), params)
    write_json(directory / CONFIG_FILE, config.to_hugging_face())


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

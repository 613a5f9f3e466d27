"""Read what a published model's directory says of its use: recipe, classes, images, lengths.

Light: `redco-flow predict` loads this module by name on a login node.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from redco_flow.errors import UsageError
from redco_flow.hub import config_in
from redco_flow.models.find import (
    DECODERS,
    ENCODER_DECODERS,
    FAMILIES,
    IMAGE_ENCODERS,
    IMAGE_TO_TEXT,
    unread_family,
)
from redco_flow.models.hub.model_files import (
    CONFIG_FILE,
    has_weights,
    model_type_of,
    quantization_method,
    quantization_problem,
)
from redco_flow.recipes.find import family_problem, find_recipe
from redco_flow.recipes.recipe import CLASSES
from redco_flow.spec.pipeline import ModelSection
from redco_flow.stages.train.positions import longest_texts

_IMAGE_FILE = "preprocessor_config.json"
_LABELLED = "ForSequenceClassification"
_OF_IMAGES = "ForImageClassification"
_RECIPES = "chat, language_modeling, text_to_text, classification, regression"
_BILINEAR = 2  # Pillow's number of it
_MOST_CHAT_TOKENS, _MOST_SOURCE_TOKENS = 8192, 1024
_MOST_ANSWER_TOKENS, _MOST_TARGET_TOKENS = 256, 128
_MOST_LABELLED_TOKENS = 512


@dataclass(frozen=True)
class Published:
    """A published model's use.

    Args:
        recipe: by its name.
        settings: the recipe's.
        dtype: what products are computed in.
        lengths: in tokens, by the preprocess stage's key.
        answer_length: the most tokens to generate; 0 of a model that generates no texts.
        notes: what may surprise.
    """

    recipe: str
    settings: Mapping[str, Any]
    dtype: str
    lengths: Mapping[str, Any]
    answer_length: int
    notes: Sequence[str] = field(default_factory=list)

    @property
    def classes(self) -> Sequence[str]:
        """The classes' names; none of other recipes."""
        return self.settings.get(CLASSES) or ()


def read_published(folder: Path, recipe: str | None = None) -> Published:
    """Read what a directory's files say.

    Args:
        recipe: that the user names; None: by the class that config.json names.

    Raises:
        UsageError: it is not read here, or what it is for is not known; says what to do.
    """
    config = config_in(folder)
    if not isinstance(config, Mapping):
        raise UsageError(f"{folder / CONFIG_FILE}: not a model's configuration.")
    family, method = model_type_of(config), quantization_method(config)
    if family not in FAMILIES:
        raise UsageError(f"{folder}: the model {unread_family(family)}")
    if method:
        raise UsageError(f"{folder}: the model {quantization_problem(method)}")
    if not has_weights(folder):
        raise UsageError(f"{folder}: has a {CONFIG_FILE}, and no parameters (model.safetensors).")
    if recipe is None:
        recipe = _recipe_of(folder, config, family)
    elif problem := _recipe_problem(recipe, family):
        raise UsageError(f"recipe={recipe}: {problem}")
    notes: list[str] = []
    settings: dict[str, Any] = {}
    if family in (*IMAGE_ENCODERS, *IMAGE_TO_TEXT):
        settings, notes = _image_settings(folder, config)
    if recipe in ("classification", "image_classification"):
        settings[CLASSES] = labels_of(config)
    if problem := head_problem(folder, recipe, settings):
        raise UsageError(problem)
    lengths, answer_length = _lengths(folder, recipe, family)
    stated = config.get("dtype") or config.get("torch_dtype")
    dtype = "bfloat16" if stated == "bfloat16" else "float32"
    return Published(recipe, settings, dtype, lengths, answer_length, notes)


def _recipe_problem(recipe: str, family: str) -> str | None:
    try:
        return family_problem(find_recipe(recipe), family)
    except ValueError as error:
        return str(error)


def labels_of(config: Mapping[str, Any]) -> list[str]:
    """Return the names of a head's classes, those of transformers where it gives none."""
    named = config.get("id2label")
    if isinstance(named, Mapping) and named:
        return [str(named[key]) for key in sorted(named, key=int)]
    return [f"LABEL_{number}" for number in range(int(config.get("num_labels") or 2))]


def head_problem(folder: Path, recipe: str, settings: Mapping[str, Any]) -> str:
    """Say why a directory has no head of labels for a recipe that needs one; empty where it has."""
    wanted = {"classification": _LABELLED, "regression": _LABELLED}
    wanted["image_classification"] = _OF_IMAGES
    config = config_in(folder)
    if recipe not in wanted or not isinstance(config, Mapping):
        return ""
    architecture, labels = _architecture(config), labels_of(config)
    if not architecture.endswith(wanted[recipe]):
        return (
            f"{folder}: the model is a {architecture or 'class that its config.json does not name'}"
            f", which has no parameters that recipe '{recipe}' predicts with: train it first."
        )
    number = 1 if recipe == "regression" else len(settings.get(CLASSES) or ())
    if number != len(labels):
        return (
            f"{folder}: the model scores {len(labels)} labels ({', '.join(labels[:10])}), and "
            f"recipe '{recipe}' has {number}."
        )
    return ""


def _architecture(config: Mapping[str, Any]) -> str:
    found = config.get("architectures")
    return str(found[0]) if isinstance(found, list) and found else ""


def _recipe_of(folder: Path, config: Mapping[str, Any], family: str) -> str:
    architecture, kind = _architecture(config), config.get("problem_type")
    if architecture.endswith(_OF_IMAGES):
        return "image_classification"
    if architecture.endswith(_LABELLED) and kind != "multi_label_classification":
        is_number = kind == "regression" or (kind is None and len(labels_of(config)) == 1)
        return "regression" if is_number else "classification"
    if family in IMAGE_TO_TEXT:
        return "image_to_text"
    if family in ENCODER_DECODERS and architecture.endswith("ForConditionalGeneration"):
        return "text_to_text"
    if family in DECODERS and architecture.endswith(("ForCausalLM", "LMHeadModel")):
        return "chat" if _has_template(folder) else "language_modeling"
    named = f"a {architecture}" if architecture else "of no class that config.json names"
    what = f"{named} ({kind})" if kind and architecture.endswith(_LABELLED) else named
    raise UsageError(
        f"{folder}: the model is {what}, so what it predicts is not known. Give recipe=NAME "
        f"({_RECIPES}), or train it first: `redco-flow init --data FILE --model {folder}`."
    )


def _has_template(folder: Path) -> bool:
    tokenizer = config_in(folder, "tokenizer_config.json")
    has_key = isinstance(tokenizer, Mapping) and bool(tokenizer.get("chat_template"))
    return has_key or (folder / "chat_template.jinja").is_file()


def _image_settings(folder: Path, config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return a recipe's settings of images, and notes."""
    model = config.get("encoder") or config
    settings = {
        "image_size": model.get("image_size", 224),
        "num_channels": model.get("num_channels", 3),
    }
    found = config_in(folder, _IMAGE_FILE)
    if not isinstance(found, Mapping):
        return settings, [f"there is no {_IMAGE_FILE}: pixels are scaled to -1 … 1"]
    if found.get("do_center_crop"):
        raise UsageError(
            f"{folder / _IMAGE_FILE}: images are cropped to their centre, which is not done here: "
            "crop the images, and set do_center_crop to false."
        )
    if found.get("do_normalize", True):
        settings |= {
            "mean": found.get("image_mean", [0.5]),
            "stddev": found.get("image_std", [0.5]),
        }
    else:
        settings |= {"mean": [0.0], "stddev": [1.0]}
    if found.get("do_rescale", True):
        settings["max_value"] = 1 / found.get("rescale_factor", 1 / 255)
    else:
        settings["max_value"] = 1.0
    is_as_theirs = found.get("resample", _BILINEAR) == _BILINEAR
    note = f"{_IMAGE_FILE} resizes in another way than bilinearly, as images are resized here"
    return settings, [] if is_as_theirs else [note]


def _lengths(folder: Path, recipe: str, family: str) -> tuple[dict[str, Any], int]:
    """Return the preprocess stage's lengths, and that of an answer, within the positions."""
    source, target = longest_texts(ModelSection(name_or_path=str(folder)), family)
    # Rotary positions have no end; what the model was trained for does.
    source = min(source, (config_in(folder) or {}).get("max_position_embeddings") or math.inf)
    if recipe.startswith("image"):
        return {}, 0
    if recipe in ("classification", "regression"):
        return {"max_source_length": int(min(source, _MOST_LABELLED_TOKENS))}, 0
    if family in ENCODER_DECODERS:
        answer = int(min(target, _MOST_TARGET_TOKENS))
        return {"max_source_length": int(min(source, _MOST_SOURCE_TOKENS))}, answer
    answer = int(min(_MOST_ANSWER_TOKENS, source // 2 if math.isfinite(source) else math.inf))
    if recipe == "chat":
        most = int(min(source, _MOST_CHAT_TOKENS)) - answer
        return {"max_length": most, "on_too_long": "error"}, answer
    return {"max_source_length": int(min(source - answer, _MOST_SOURCE_TOKENS))}, answer

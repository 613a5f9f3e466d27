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
_LABELLED, _OF_IMAGES = "ForSequenceClassification", "ForImageClassification"
_HEADS = {
    "classification": _LABELLED,
    "regression": _LABELLED,
    "image_classification": _OF_IMAGES,
}
_MULTI_LABEL = "multi_label_classification"
_BILINEAR = 2  # Pillow's number of it
_MOST_CHAT_TOKENS, _MOST_SOURCE_TOKENS = 8192, 1024
MOST_ANSWER_TOKENS, _MOST_TARGET_TOKENS = 256, 128
_MOST_LABELLED_TOKENS = 512
_TEMPLATE_OF_PROCESSOR = "chat_template.json"


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
    settings: dict[str, Any] = {}
    notes: list[str] = []
    if family in (*IMAGE_ENCODERS, *IMAGE_TO_TEXT):
        settings, notes = _image_settings(folder, config)
    if recipe in _HEADS and recipe != "regression":
        settings[CLASSES] = labels_of(folder, config)
    if problem := head_problem(folder, config, recipe, settings):
        raise UsageError(problem)
    lengths, answer_length, is_ours = _lengths(folder, recipe, family)
    if is_ours:
        longest = lengths["max_source_length"]
        notes.append(
            f"texts of more than {longest} tokens are cut: preprocess.max_source_length={longest}"
        )
    if recipe == "language_modeling" and (folder / _TEMPLATE_OF_PROCESSOR).is_file():
        notes.append(f"{_TEMPLATE_OF_PROCESSOR} is a processor's, and is not read")
    stated = config.get("dtype") or config.get("torch_dtype")
    dtype = "bfloat16" if stated == "bfloat16" else "float32"
    return Published(recipe, settings, dtype, lengths, answer_length, notes)


def _recipe_problem(recipe: str, family: str) -> str | None:
    try:
        return family_problem(find_recipe(recipe), family)
    except ValueError as error:
        return str(error)


def labels_of(folder: Path, config: Mapping[str, Any]) -> list[str]:
    """Return the names of a head's classes, those of transformers where it gives none.

    Raises:
        UsageError: their numbers are not numbers, or two have one name.
    """
    named = config.get("id2label")
    if not isinstance(named, Mapping) or not named:
        return [f"LABEL_{number}" for number in range(int(config.get("num_labels") or 2))]
    try:
        labels = [str(named[key]) for key in sorted(named, key=int)]
    except ValueError as error:
        raise UsageError(
            f"{folder / CONFIG_FILE}: id2label must name classes by their numbers, as "
            f'{{"0": "no", "1": "yes"}}, and has {", ".join(map(repr, named))}.'
        ) from error
    if len({*labels}) < len(labels):
        raise UsageError(
            f"{folder / CONFIG_FILE}: id2label gives two classes one name: {', '.join(labels)}."
        )
    return labels


def head_problem(
    folder: Path, config: Mapping[str, Any], recipe: str, settings: Mapping[str, Any]
) -> str:
    """Say why a directory has no head of labels for a recipe that needs one; empty where it has.

    Args:
        config: the directory's.
        settings: the recipe's; `classes` must be the head's, in its order.
    """
    if recipe not in _HEADS:
        return ""
    architecture = _architecture(config)
    if not architecture.endswith(_HEADS[recipe]):
        return (
            f"{folder}: the model is a {architecture or 'class that its config.json does not name'}"
            f", which has no parameters that recipe '{recipe}' predicts with: train it first."
        )
    if config.get("problem_type") == _MULTI_LABEL:
        return (
            f"{folder}: the model gives a text any number of its classes ({_MULTI_LABEL}), which "
            "no recipe predicts."
        )
    labels = labels_of(folder, config)
    if recipe == "regression":
        return "" if len(labels) == 1 else f"{folder}: the model scores {len(labels)} labels."
    classes = list(map(str, settings.get(CLASSES) or ()))
    is_unnamed = labels == [f"LABEL_{number}" for number in range(len(labels))]
    fits = len(classes) == len(labels) and is_unnamed and not {*classes} & {*labels}
    if classes == labels or fits:
        return ""
    return (
        f"{folder}: the model's classes are {', '.join(labels[:10])}, in this order, and those of "
        f"settings.classes {', '.join(classes[:10])}: leave settings.classes out."
    )


def _architecture(config: Mapping[str, Any]) -> str:
    found = config.get("architectures")
    return str(found[0]) if isinstance(found, list) and found else ""


def _recipe_of(folder: Path, config: Mapping[str, Any], family: str) -> str:
    architecture, kind = _architecture(config), config.get("problem_type")
    if architecture.endswith(_OF_IMAGES):
        return "image_classification"
    if architecture.endswith(_LABELLED) and kind != _MULTI_LABEL:
        is_number = kind == "regression" or (kind is None and len(labels_of(folder, config)) == 1)
        return "regression" if is_number else "classification"
    if family in IMAGE_TO_TEXT:
        return "image_to_text"
    if family in ENCODER_DECODERS and architecture.endswith("ForConditionalGeneration"):
        return "text_to_text"
    if family in DECODERS and architecture.endswith(("ForCausalLM", "LMHeadModel")):
        return "chat" if _has_template(folder) else "language_modeling"
    named = f"a {architecture}" if architecture else "of no class that config.json names"
    is_multi = architecture.endswith(_LABELLED)
    what = f"{named} ({kind})" if is_multi else named
    texts = {DECODERS: "chat or language_modeling", ENCODER_DECODERS: "text_to_text"}
    fitting = next((fits for families, fits in texts.items() if family in families), "")
    give = f"Give recipe=NAME ({fitting}), or train" if fitting and not is_multi else "Train"
    raise UsageError(
        f"{folder}: the model is {what}, so what it predicts is not known. {give} it first: "
        f"`redco-flow init DIRECTORY --data FILE --model {folder}`."
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
    normalizes, rescales = found.get("do_normalize", True), found.get("do_rescale", True)
    settings |= {
        "mean": found.get("image_mean", [0.5]) if normalizes else [0.0],
        "stddev": found.get("image_std", [0.5]) if normalizes else [1.0],
        "max_value": 1 / found.get("rescale_factor", 1 / 255) if rescales else 1.0,
    }
    size = found.get("size")
    otherwise = {
        "resizes in another way than bilinearly": found.get("resample", _BILINEAR) != _BILINEAR,
        "resizes nothing (do_resize)": not found.get("do_resize", True),
        "keeps the shape (shortest_edge)": isinstance(size, Mapping) and "shortest_edge" in size,
    }
    theirs = " and ".join(what for what, differs in otherwise.items() if differs)
    size_here = f"images are resized here to {settings['image_size']} pixels squared, bilinearly"
    return settings, [f"{_IMAGE_FILE} {theirs}: {size_here}"] if theirs else []


def _lengths(folder: Path, recipe: str, family: str) -> tuple[dict[str, Any], int, bool]:
    """Return the preprocess stage's lengths, that of an answer, and whether the model reads more.

    The lengths are within the model's positions.
    """
    source, target = longest_texts(ModelSection(name_or_path=str(folder)), family)
    # Rotary positions have no end; what the model was trained for does.
    source = min(source, (config_in(folder) or {}).get("max_position_embeddings") or math.inf)
    if recipe.startswith("image"):
        return {}, 0, False
    if recipe in _HEADS:
        most, answer = _MOST_LABELLED_TOKENS, 0
    elif family in ENCODER_DECODERS:
        most, answer = _MOST_SOURCE_TOKENS, int(min(target, _MOST_TARGET_TOKENS))
    else:
        most = _MOST_SOURCE_TOKENS
        answer = int(min(MOST_ANSWER_TOKENS, source // 2 if math.isfinite(source) else math.inf))
        source -= answer
    if recipe == "chat":
        longest = int(min(source, _MOST_CHAT_TOKENS - answer))
        return {"max_length": longest, "on_too_long": "error"}, answer, False
    return {"max_source_length": int(min(source, most))}, answer, source > most

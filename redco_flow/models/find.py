"""Find a model family by its name, a Hugging Face `model_type`, or a dotted module.

A family is found as an object with `Config` (`from_hugging_face`, `updated`, `to_hugging_face`)
and the functions of its kind: `init_params`, `abstract_params`, `apply`, `tensor_layouts`,
`config_of_tensors`, `IGNORED_TENSORS`; encoders and encoder-decoders also have `encode`; those that
generate have `decode_step` and, for its cache, `prefill` (decoder-only) or `init_cache`, and may
have `decoding_params`, where parameters laid out otherwise decode faster, and `grow_cache`.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from redco_flow.models.family import ModelFamily

# The families of this package by kind, as `model_type` names them, with underscores.
ENCODER_DECODERS = ("t5", "bart")
ENCODERS = ("bert", "roberta")
DECODERS = (
    "gpt2",
    "gptj",
    "opt",
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "olmo2",
    "phi3",
    "smollm3",
    "gemma2",
    "gemma3_text",
    "mixtral",
    "gpt_oss",
    "deepseek_v3",
)
IMAGE_ENCODERS = ("vit",)
IMAGE_TO_TEXT = ("vision_encoder_decoder",)
FAMILIES = (*ENCODER_DECODERS, *ENCODERS, *DECODERS, *IMAGE_ENCODERS, *IMAGE_TO_TEXT)

# The modules of `families/` that do not have the name of their one family. They are imported by
# name, so that code which finds families does not depend on all of them (`tracking.code_digest`).
_TABLES = {
    **dict.fromkeys(DECODERS, "decoders"),
    **dict.fromkeys(("gpt2", "gptj", "opt"), "gpt"),
    "deepseek_v3": "deepseek_v3",
    **dict.fromkeys((*ENCODERS, *IMAGE_ENCODERS), "encoders"),
}
# What is not nearest by its letters.
_NEAREST = {"gemma3": "gemma3_text"}
_ALIKE = 0.55
_PLAIN = "'llama' (decoder-only), 't5' (encoder-decoder) and 'bert' (encoder)"
# What a module of its own must have, and all that it may have in place of its kind's.
_NEEDED = ("Config", "init_params", "apply")
_OWN = {*_NEEDED[1:], "abstract_params", "tensor_layouts", "config_of_tensors", "IGNORED_TENSORS"}


def find_model(name: str) -> ModelFamily[Any]:
    """Return a family's functions; imports JAX.

    Args:
        name: one of FAMILIES, as transformers calls it too (with hyphens), or a dotted name of any
            importable module: with a `Config` that has a `family()`, as those of this package, or
            with `Config` and functions of its own.

    Raises:
        ValueError: there is none of that name, or its module is not a family.
    """
    family: ModelFamily[Any]
    if (ours := name.replace("-", "_")) in FAMILIES:
        family = find_config(ours).family()
        return family
    module: Any = importlib.import_module(find_module_name(name))
    config: Any = getattr(module, "Config", None)
    if hasattr(config, "family") and vars(module).keys().isdisjoint(_OWN):
        family = config.family()
        return family
    if missing := [part for part in _NEEDED if not hasattr(module, part)]:
        raise ValueError(
            f"module {name} is no model family: it has no {', '.join(missing)}. Give it a Config "
            "like those in redco_flow/models/families/decoders.py and no functions, or all the "
            "functions (docs/extend/family.md)."
        )
    family = module
    return family


def find_module_name(name: str) -> str:
    """Return the dotted name of a family's module without importing it.

    Raises:
        ValueError: there is none of that name.
    """
    if name in FAMILIES:
        return f"redco_flow.models.families.{_TABLES.get(name, name)}"
    if "." not in name or not _exists(name):
        known = ", ".join(FAMILIES)
        near = _NEAREST.get(name) or next(
            iter(difflib.get_close_matches(name, FAMILIES, n=1)), None
        )
        hint = f"did you mean {near!r}? Known" if near else "known"
        raise ValueError(
            f"no model family {name!r}; {hint}: {known}, or the dotted name of your own module."
        )
    return name


def unread_family(model_type: str) -> str:
    """Say of a model, in words that follow its name, that no family reads it, and what to do."""
    near = _NEAREST.get(model_type) or next(
        iter(difflib.get_close_matches(model_type, FAMILIES, n=1, cutoff=_ALIKE)), None
    )
    nearest = f"the nearest by name is '{near}'" if near else f"plain ones are {_PLAIN}"
    table = find_module_name(near or "llama").rpartition(".")[2]
    return (
        f"is of family '{model_type}', which is none of those that are read: "
        f"{', '.join(FAMILIES)}; {nearest}. To add it, write a module with a Config like "
        f"those in redco_flow/models/families/{table}.py, and name it by model.family "
        "(docs/extend/family.md)."
    )


def find_config(name: str) -> Any:
    """Return the config class of one of FAMILIES without importing JAX, so on a login node."""
    module = importlib.import_module(find_module_name(name))
    model_types = {name, name.replace("_", "-")}
    return next(
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and value.__module__ == module.__name__
        and getattr(value, "model_type", None) in model_types
    )


def _exists(dotted: str) -> bool:
    """Whether there is such a module; its parents are imported, as Python's search needs them."""
    if not all(part.isidentifier() for part in dotted.split(".")):
        return False
    try:
        return importlib.util.find_spec(dotted) is not None
    except ModuleNotFoundError:
        return False
    except Exception as error:  # a module of the user's may raise anything
        parent = dotted.rpartition(".")[0]
        raise ValueError(f"importing {parent} failed: {type(error).__name__}: {error}") from error

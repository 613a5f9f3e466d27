"""Find a model family's module by its name, a Hugging Face `model_type`, or a dotted module.

A family is one module with `Config` (see `t5.py`; it has `from_hugging_face`, `updated`,
`to_hugging_face`), and these functions, its own or taken from the model that all families of its
kind share: `init_params`, `abstract_params`, `apply`, `tensor_layouts`,
`config_of_tensors`, `IGNORED_TENSORS`; encoders and encoder-decoders also `encode`; those that
generate `decode_step` and, for the cache it takes, `prefill` (decoder-only) or `init_cache`;
`decoding_params` where parameters laid out otherwise decode faster, and `grow_cache` where these
two take `room`.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from types import ModuleType
from typing import Any

# Families of this package; a file `<name>.py` beside this one.
FAMILIES = (
    "t5",
    "bart",
    "bert",
    "roberta",
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
    "vit",
    "vision_encoder_decoder",
)


# What is not nearest by its letters.
_NEAREST = {"gemma3": "gemma3_text"}
_ALIKE = 0.55
_PLAIN = "'llama' (decoder-only), 't5' (encoder-decoder) and 'bert' (encoder)"


def find_model(name: str) -> ModuleType:
    """Import the module of a family.

    Args:
        name: one of FAMILIES, as transformers calls it too (with hyphens), or a dotted name of any
            importable module with the same functions.

    Raises:
        ValueError: there is none of that name, or it has no `Config`.
    """
    if (ours := name.replace("-", "_")) in FAMILIES:
        return importlib.import_module(f"redco_flow.models.families.{ours}")
    module = importlib.import_module(find_module_name(name))
    if not hasattr(module, "Config"):
        raise ValueError(f"module {name} is no model family: it has no Config (as t5.py has).")
    return module


def find_module_name(name: str) -> str:
    """Return the dotted name of a family's module without importing it.

    Raises:
        ValueError: there is none of that name.
    """
    if name in FAMILIES:
        return f"redco_flow.models.families.{name}"
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
    return (
        f"is of family '{model_type}', which is none of those that are read: "
        f"{', '.join(FAMILIES)}; {nearest}. To add it, write a module as "
        f"redco_flow/models/families/{near or 'llama'}.py is one, and name that by model.family "
        "(docs/guides/engine.md, 'A family of your own')."
    )


def find_config(name: str) -> Any:
    """Return the config class of one of FAMILIES without importing JAX, so on a login node."""
    module = importlib.import_module(f"redco_flow.models.families.{name}")
    return module.Config


def _exists(dotted: str) -> bool:
    """Whether there is such a module; its parents are imported, as Python's search needs them.

    Raises:
        ValueError: a parent fails to import; the message says how.
    """
    if not all(part.isidentifier() for part in dotted.split(".")):
        return False
    try:
        return importlib.util.find_spec(dotted) is not None
    except ModuleNotFoundError:
        return False
    except Exception as error:  # a module of the user's may raise anything
        parent = dotted.rpartition(".")[0]
        raise ValueError(f"importing {parent} failed: {type(error).__name__}: {error}") from error

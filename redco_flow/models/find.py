"""Find a model family's module by its name, a Hugging Face `model_type`, or a dotted module.

A family is one module with this face (see `t5.py`): `Config` (with `from_hugging_face`,
`updated`, `to_hugging_face`), `init_params`, `abstract_params`, `apply`, `tensor_layouts`,
`config_of_tensors`, `IGNORED_TENSORS`; encoder-decoders also `encode`, `init_cache`,
`decode_step`. Refuses to know what any of them does.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

# Families of this package; a file `<name>.py` beside this one.
FAMILIES = ("t5",)


def find_model(name: str) -> ModuleType:
    """Import the module of a family.

    Args:
        name: one of FAMILIES, or a dotted name of any importable module with the same face.

    Raises:
        ValueError: there is none of that name, or it has no `Config`.
    """
    if name in FAMILIES:
        return importlib.import_module(f"redco_flow.models.{name}")
    known = ", ".join(FAMILIES)
    if "." not in name or not _exists(name):
        raise ValueError(
            f"no model family {name!r}; known: {known}, or the dotted name of your own module."
        )
    module = importlib.import_module(name)
    if not hasattr(module, "Config"):
        raise ValueError(f"module {name} is no model family: it has no Config (as t5.py has).")
    return module


def _exists(dotted: str) -> bool:
    try:
        return importlib.util.find_spec(dotted) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False

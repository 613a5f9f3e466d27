"""The model of a `Recipe.model` record: its family, config, parameter shapes and tensor layouts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from redco_flow.engine.sharding.rules import join, named_leaves
from redco_flow.errors import ArtifactError
from redco_flow.models import classifier
from redco_flow.models.classifier import ClassifierConfig
from redco_flow.models.find import find_model
from redco_flow.models.hub.layouts import TensorLayout
from redco_flow.recipes.recipe import LABELS


@dataclass(frozen=True)
class RecordedModel:
    """A model by its record.

    Args:
        module, config: the family's; of a model with a head of labels `models.classifier`'s.
        layouts: a tree like the parameters of their tensor layouts.
        shapes: the same of their shapes.
    """

    module: Any
    config: Any
    layouts: Any
    shapes: Any

    @property
    def architectures(self) -> tuple[str, ...]:
        """Names of the model's classes in transformers."""
        return tuple(self.config.architectures())

    @property
    def module_renamings(self) -> Mapping[str, str]:
        """Names of transformers' modules that differ from the names of their tensors in files."""
        found: Mapping[str, str] = getattr(self.config, "module_renamings", {})
        return found

    @cached_property
    def parameters(self) -> dict[str, tuple[TensorLayout, Any]]:
        """The layout and the shape of each parameter, by its path."""
        structure: Any = jax.tree.structure(self.shapes)
        pairs = zip(named_leaves(self.shapes), structure.flatten_up_to(self.layouts), strict=True)
        return {join(path): (layout, leaf) for (path, leaf), layout in pairs}

    @property
    def head(self) -> tuple[str, ...]:
        """Paths of the parameters of a head of labels, the pooler's too."""
        parts = ("pooler", "classifier") if hasattr(self.config, "labels") else ("classifier",)
        return tuple(path for path in self.parameters if path.partition("/")[0] in parts)


def find_recorded_model(recipe: str, model: Mapping[str, Any]) -> RecordedModel:
    """Return the model of a recipe's record.

    Raises:
        ArtifactError: it names no model family, or the family has no layout of Hugging Face's.
    """
    family = model.get("family")
    if not isinstance(family, str):
        raise ArtifactError(
            f"the model of recipe '{recipe}' is its own and names no model family, so which "
            "of its parameters is which tensor of transformers is not known. Read its parameters "
            "with the recipe, or give the model a family (docs: extend)."
        )
    module: Any = find_model(family)
    missing = [
        name
        for owner, name in (
            (module, "tensor_layouts"),
            (module, "abstract_params"),
            (module.Config, "to_hugging_face"),
            (module.Config, "architectures"),
        )
        if not hasattr(owner, name)
    ]
    if missing:
        raise ArtifactError(
            f"model family '{family}' has no Hugging Face layout: it lacks {', '.join(missing)} "
            "(docs/extend/family.md)."
        )
    config = module.Config().updated(model["config"])
    if LABELS in model:
        config, module = ClassifierConfig.of(family, config, model[LABELS]), classifier
    return RecordedModel(
        module, config, module.tensor_layouts(config), module.abstract_params(config)
    )

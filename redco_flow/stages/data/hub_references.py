"""Find the hub repositories in a stage's `model` and `data` sections, and set their commits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redco_flow.hub import HubError, Kind, is_hub_name
from redco_flow.local_paths import expanded, is_folder
from redco_flow.models.find import FAMILIES, unread_family
from redco_flow.models.hub.model_files import (
    CONFIG_FILE,
    INDEX_FILE,
    SINGLE_FILE,
    has_weights,
    model_type_of,
    quantization_method,
    quantization_problem,
)
from redco_flow.recipes.find import family_problem, find_own_recipe, find_recipe_if_any
from redco_flow.spec.pipeline import DataSection, ModelSection
from redco_flow.spec.stage_kind import StageConfig
from redco_flow.stages.artifacts.tokenizer import files_of_tokenizer, model_files, tokenizer_files
from redco_flow.stages.data.source import hub_dataset
from redco_flow.stages.data.splits import unread_splits
from redco_flow.text.tokenizer_files import is_of_tokenizer

_OTHER_WEIGHTS = (".bin", ".h5", ".msgpack", ".ot", ".gguf")


@dataclass(frozen=True)
class HubName:
    """One name in a Config that the hub, or a local directory, answers to.

    Args:
        section: the path of the mapping that has the name and its `revision`.
        key: the name's own key there.
        is_local: the name is a path on this machine; nothing is asked of the hub.
        reads_weights: the stage loads a model's parameters.
        reads_tokenizer: the stage loads its tokenizer.
        recipe: whose model it is, where config.json is to say its family; else empty.
        data: the section that names a dataset.
        files: all that a local model or tokenizer is read from.
    """

    section: tuple[str, ...]
    key: str
    kind: Kind
    name: str
    revision: str | None
    is_local: bool = False
    reads_weights: bool = False
    reads_tokenizer: bool = False
    recipe: str = ""
    data: DataSection | None = None
    files: tuple[Path, ...] = ()

    @property
    def subset(self) -> str | None:
        """The part of a dataset that the stage reads; None: the only one, or a model."""
        return None if self.data is None else self.data.subset

    def missing(self, files: frozenset[str], folder: Path | None) -> str:
        """Say what the stage needs that is not among the files; empty where nothing is missing.

        Args:
            files: names in the repository or directory.
            folder: of the hub's cache, where they are in it.
        """
        if self.kind == "dataset":
            return ""
        if self.reads_weights and CONFIG_FILE not in files:
            return f"has no {CONFIG_FILE}."
        if self.reads_weights and not self._has_weights(files, folder):
            others = sorted(f for f in files if f.endswith(_OTHER_WEIGHTS))
            has = f"only {', '.join(others[:3])}" if others else "no parameters"
            return (
                f"has {has}, and redco-flow reads {SINGLE_FILE} or {INDEX_FILE}: load it with "
                "transformers, use its save_pretrained into a directory, and name that; or another "
                "revision that has them."
            )
        if self.reads_tokenizer and not any(map(is_of_tokenizer, files)):
            return "has no tokenizer: name another by data.tokenizer, or train one."
        return ""

    def _has_weights(self, files: frozenset[str], folder: Path | None) -> bool:
        # A cache may have the index without all the files that it names.
        if folder is not None:
            return has_weights(folder)
        return bool(files & {SINGLE_FILE, INDEX_FILE})

    def model_problem(self, config: Any) -> str:
        """Say, by its config.json, why the stage cannot use a model; empty where it can."""
        if problem := self._family_problem(model_type_of(config)):
            return problem
        quantization = quantization_method(config) if self.reads_weights else ""
        return quantization_problem(quantization) if quantization else ""

    def _family_problem(self, model_type: str) -> str:
        recipe = find_own_recipe(self.recipe) if model_type else None
        if recipe is None:
            return ""
        if model_type not in FAMILIES:
            return unread_family(model_type)
        problem = family_problem(recipe, model_type)
        return f"is of family '{model_type}': {problem}" if problem else ""

    def unread_splits(self, card: Mapping[str, Any]) -> str:
        """Say which splits the stage will not read, by a dataset's card; empty where it reads all.

        Raises:
            HubError: the pipeline names a split that is not there.
        """
        if self.data is None or not (there := splits_in_card(card, self.data.subset)):
            return ""
        try:
            return unread_splits(self.data, there) or ""
        except ValueError as error:
            raise HubError(str(error)) from error


def hub_references(config: StageConfig) -> Iterator[HubName]:
    """Yield what a stage's `model` and `data` sections name, local directories of models too."""
    data = getattr(config, "data", None)
    own_tokenizer = data.tokenizer if isinstance(data, DataSection) else None
    recipe = getattr(config, "recipe", "")
    for section in ("model", "pretrained"):
        model = getattr(config, section, None)
        if not isinstance(model, ModelSection) or model.name_or_path is None:
            continue
        is_local = _is_local(model.name_or_path)
        files: list[Path] = []
        if is_local and model.reads_weights:
            files = model_files(model)
        elif is_local and isinstance(data, DataSection) and own_tokenizer is None:
            files = tokenizer_files(model, data)
        yield HubName(
            (section,),
            "name_or_path",
            "model",
            model.name_or_path,
            model.revision,
            is_local=is_local,
            reads_weights=model.reads_weights and not model.from_scratch,
            reads_tokenizer=not model.reads_weights
            and own_tokenizer is None
            and _has_tokenizer(recipe),
            recipe=recipe if model.reads_weights and model.family is None else "",
            files=tuple(files),
        )
    if own_tokenizer is not None and (name := own_tokenizer.name_or_path) is not None:
        is_local = _is_local(name)
        yield HubName(
            ("data", "tokenizer"),
            "name_or_path",
            "model",
            name,
            own_tokenizer.revision,
            is_local=is_local,
            reads_tokenizer=True,
            files=tuple(files_of_tokenizer(name)) if is_local else (),
        )
    if isinstance(data, DataSection) and (dataset := hub_dataset(data)) is not None:
        yield HubName(("data",), "dataset", "dataset", dataset, data.revision, data=data)


def _has_tokenizer(recipe: str) -> bool:
    found = find_recipe_if_any(recipe)
    return found is None or found.has_tokenizer


def splits_in_card(card: Mapping[str, Any], subset: str | None) -> list[str]:
    """Return the names of a subset's splits by a dataset's card; empty where it does not say.

    Args:
        card: the metadata at the top of README.md, which anyone may have written.
    """
    configs = _named(card.get("configs"), subset)
    files = configs.get("data_files")
    splits = files
    if not isinstance(files, list):
        splits = _named(card.get("dataset_info"), subset).get("splits")
    ones = (
        [one for one in splits or () if isinstance(one, dict)] if isinstance(splits, list) else []
    )
    found = [one.get("split", one.get("name")) for one in ones]
    return [str(name) for name in dict.fromkeys(found) if name is not None]


def _named(entries: Any, subset: str | None) -> dict[str, Any]:
    """The entry of a subset, or of the one that is read without a name."""
    listed = entries if isinstance(entries, list) else [entries]
    known = [one for one in listed if isinstance(one, dict)]
    if subset is not None:
        known = [one for one in known if one.get("config_name", "default") == subset]
    defaults = [one for one in known if one.get("default") or one.get("config_name") == "default"]
    return next(iter(defaults or known[: len(known) == 1]), {})


def _is_local(name: str) -> bool:
    """Whether the name of a model is a path: what exists, or looks like one."""
    return not is_hub_name(name) or is_folder(expanded(name))

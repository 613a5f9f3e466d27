"""The checkpoint artifact: everything that predicting and exporting need.

`checkpoint/` (one committed step), `recipe.json` (which recipe around which model) and
`tokenizer/`; of a training of low-rank factors `adapter.json`, and the factors beside the merged
parameters. Nothing in it points anywhere else.
"""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, final

import jax

from redco_flow.engine.checkpoint.checkpointer import checkpoint_files, restore_params
from redco_flow.engine.checkpoint.commit import PARAMS, TRAINING
from redco_flow.engine.deployer import Deployer
from redco_flow.engine.sharding.rules import ShardingRules
from redco_flow.errors import ArtifactError
from redco_flow.recipes.find import find_recipe
from redco_flow.recipes.recipe import Recipe, TokenLengths
from redco_flow.records import digest_file, read_json, read_json_if_present, write_json
from redco_flow.stages.artifacts.dataset import TOKENIZER_FOLDER
from redco_flow.text.tokenizer import TextTokenizer

FORMAT = 1
RECIPE_FILE = "recipe.json"
ADAPTER_FILE = "adapter.json"
CHECKPOINT_FOLDER = "checkpoint"


@dataclass(frozen=True)
class ModelRecord:
    """The facts by which a model is used.

    Args:
        model: what the recipe's `build` makes the model from, without any other file.
        source_length, target_length: what batches were padded to in training.
        tokenizer_digest: the tokenizer that the model was trained with; "" where it has none, and
            then both lengths are 0.
        step: of this checkpoint.
    """

    recipe: str
    model: Mapping[str, Any]
    source_length: int
    target_length: int
    tokenizer_digest: str
    step: int


@dataclass(frozen=True)
class RecipeRecord(ModelRecord):
    """`recipe.json`.

    Args:
        metrics: of this checkpoint.
        data, config: digests of the dataset and of the training's settings.
    """

    metrics: Mapping[str, float | None]
    data: str
    config: str
    format: int = FORMAT


@dataclass(frozen=True)
class AdapterRecord:
    """`adapter.json`: the low-rank factors, stored in the checkpoint as `lora/<path>/a, b`.

    Args:
        rank, alpha: the parameters have the factors' product in them, alpha / rank times.
        targets: of each kernel with factors `path`, and the positions of its dims `stack`,
            `inputs` and `outputs`.
        factors: their digests, as `parameter_digests` makes them.
        rank_stabilized: it is alpha / sqrt(rank) times.
        dora: magnitudes are stored next to the factors, `lora/<path>/m`.
        full: paths of the parameters that were trained in full; None: an older version wrote the
            record, and there were none.
        base_dtype: in which the frozen kernels were kept; None: not known.
    """

    rank: int
    alpha: float
    targets: list[dict[str, Any]]
    factors: Mapping[str, str]
    rank_stabilized: bool = False
    dora: bool = False
    full: list[str] | None = None
    base_dtype: str | None = None


class TrainedModel(ABC):
    """A model with its parameters and its tokenizer."""

    @property
    @abstractmethod
    def record(self) -> ModelRecord:
        """The recipe and the model.

        Raises:
            ArtifactError: it cannot be read.
        """

    @property
    @abstractmethod
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer that the model was trained with."""

    @abstractmethod
    def read_params(self, recipe: Recipe, shardings: Any) -> Any:
        """Read the parameters, laid out by a tree of shardings.

        Raises:
            CheckpointError: a file is damaged, or the parameters are another model's.
        """

    @final
    def build_recipe(
        self,
        source_length: int | None = None,
        target_length: int | None = None,
        *,
        recipe: str | None = None,
    ) -> Recipe:
        """Make a recipe around the model, for batches of training's lengths or others.

        Args:
            recipe: one that shares the model; None: the recipe that trained it.
        """
        record, name = self.record, recipe or self.record.recipe
        model = record.model
        if name != record.recipe:
            model = {key: value for key, value in model.items() if key != "settings"}
        if not record.tokenizer_digest:
            return find_recipe(name).make(model, None)
        texts = TokenLengths(
            self.tokenizer,
            record.source_length if source_length is None else source_length,
            record.target_length if target_length is None else target_length,
        )
        return find_recipe(name).make(model, texts)

    @final
    def load_params(
        self, recipe: Recipe, deployer: Deployer, rules: ShardingRules | None = None
    ) -> Any:
        """Read the parameters, laid out over the deployer's mesh.

        Args:
            rules: not needed where there is one model shard.

        Raises:
            CheckpointError: a file is damaged, or the parameters are another model's.
        """
        shapes = recipe.abstract_params()
        rules = rules or deployer.get_sharding_rules(shapes)
        return self.read_params(recipe, deployer.params_sharding(shapes, rules))


@dataclass(frozen=True)
class CheckpointArtifact(TrainedModel):
    """A checkpoint artifact's files; digests are checked as parameters are read."""

    path: Path

    @cached_property
    def record(self) -> RecipeRecord:
        """The content of `recipe.json`.

        Raises:
            ArtifactError: there is none, or it is of another version.
        """
        try:
            record = read_json(self.path / RECIPE_FILE)
            if record["format"] != FORMAT:
                raise ArtifactError(
                    f"{self.path}: checkpoint format {record['format']}; this version reads "
                    f"{FORMAT}: train again."
                )
            return RecipeRecord(**record)
        except (FileNotFoundError, KeyError, TypeError, ValueError) as error:
            raise ArtifactError(f"{self.path}: no checkpoint of redco-flow: {error}") from error

    @property
    def adapter(self) -> AdapterRecord | None:
        """The content of `adapter.json`; None if no factors were trained."""
        found = read_json_if_present(self.path / ADAPTER_FILE)
        return None if found is None else AdapterRecord(**found)

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The tokenizer that the model was trained with."""
        return TextTokenizer.load(self.path / TOKENIZER_FOLDER)

    def read_params(self, recipe: Recipe, shardings: Any) -> Any:
        """Read the parameters, after checking their digests; see `TrainedModel`."""
        like = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            recipe.abstract_params(),
            shardings,
        )
        return restore_params(self.path / CHECKPOINT_FOLDER, like)


def write_checkpoint_artifact(
    folder: Path,
    step_directory: Path,
    tokenizer: Path | None,
    record: RecipeRecord,
    adapter: AdapterRecord | None = None,
    *,
    params_only: bool = False,
) -> dict[str, str]:
    """Put an artifact's files together; big ones are linked where the disk can.

    Args:
        adapter: of the factors that the step has beside merged parameters, if it has.
        params_only: leave the step's optimizer state out.

    Returns:
        BLAKE3 by path relative to `folder`, of all its files.
    """
    if folder.exists():
        shutil.rmtree(folder)
    digests = {}
    for path, digest in checkpoint_files(step_directory, params_only=params_only).items():
        _link(step_directory / path, folder / CHECKPOINT_FOLDER / path)
        digests[f"{CHECKPOINT_FOLDER}/{path}"] = digest
    for file in sorted(tokenizer.iterdir()) if tokenizer else ():
        _link(file, folder / TOKENIZER_FOLDER / file.name)
        digests[f"{TOKENIZER_FOLDER}/{file.name}"] = digest_file(file)
    for name, said in ((RECIPE_FILE, record), (ADAPTER_FILE, adapter)):
        if said is not None:
            write_json(folder / name, asdict(said))
            digests[name] = digest_file(folder / name)
    return digests


def checkpoint_identity(
    digests: Mapping[str, str], parameters: Mapping[str, str], state: Mapping[str, str]
) -> dict[str, str]:
    """Return what a checkpoint artifact's id follows: parameters, state, recipe and tokenizer.

    Orbax lays equal arrays into different files each time, so those are left out.

    Args:
        digests: of the artifact's files, from `write_checkpoint_artifact`.
        parameters: the `parameter_digests` of its step.
        state: digests of what it carries beside them, from which a training may continue:
            optimizer state, step, seed and cursor.
    """
    folder = f"{CHECKPOINT_FOLDER}/"
    others = {path: digest for path, digest in digests.items() if not path.startswith(folder)}
    stores = {PARAMS: parameters, TRAINING: state}
    arrays = {
        f"{part}/{path}": one for part, found in stores.items() for path, one in found.items()
    }
    return others | {folder + path: digest for path, digest in arrays.items()}


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:  # another disk, or one that knows no links
        shutil.copyfile(source, target)

"""Write a checkpoint artifact as transformers or PEFT reads it, in a process of its own.

`python -m redco_flow.stages.artifacts.hugging_face` reads a `Request` as JSON from standard input
and ends with a line of JSON on standard output: a `Written`, or `{"error": …}`. One parameter is in
memory at a time, beside the file that is being filled. Compares no digests: the caller has.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from redco_flow.engine.checkpoint.checkpointer import StoredArray, stored_arrays
from redco_flow.engine.sharding.rules import join, named_leaves
from redco_flow.engine.step.lora import FACTORS
from redco_flow.errors import ArtifactError, RedcoFlowError
from redco_flow.model_files import CONFIG_FILE, GENERATION_FILE
from redco_flow.models import classifier
from redco_flow.models.classifier import ClassifierConfig
from redco_flow.models.find import find_model
from redco_flow.models.hub import adapters
from redco_flow.models.hub.adapters import FactoredKernel, adapter_config, adapter_tensors
from redco_flow.models.hub.layouts import TensorLayout
from redco_flow.models.hub.tensors import MAX_FILE_BYTES, save_params
from redco_flow.recipes.recipe import LABELS
from redco_flow.records import write_json
from redco_flow.stages.artifacts.checkpoint import (
    ADAPTER_FILE,
    CHECKPOINT_FOLDER,
    AdapterRecord,
    CheckpointArtifact,
)
from redco_flow.stages.artifacts.dataset import TOKENIZER_FOLDER

IMAGE_PROCESSOR_FILE = "preprocessor_config.json"
_BILINEAR = 2  # Pillow's number of it
# What transformers' GenerationConfig takes of a model's own configuration.
_OF_GENERATION = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "decoder_start_token_id",
    "forced_bos_token_id",
    "forced_eos_token_id",
)


@dataclass(frozen=True)
class Request:
    """What is to be written.

    Args:
        checkpoint: the artifact's files.
        folder: where to; exists.
        form: the whole model, or the low-rank factors alone.
        dtype: of the model's parameters; None: the widest that they are stored in.
        base, revision: the hub's name and commit of the model that factors belong to.
        max_file_bytes: of a safetensors file.
    """

    checkpoint: str
    folder: str
    form: Literal["model", "adapter"]
    dtype: str | None = None
    base: str | None = None
    revision: str | None = None
    max_file_bytes: int = MAX_FILE_BYTES


@dataclass(frozen=True)
class Written:
    """What was written, as far as a model card says it.

    Args:
        architectures: transformers' classes.
        dtype: of the parameters.
        num_parameters: of the model, or of the factors.
        target_length: tokens of the longest target in training.
    """

    architectures: tuple[str, ...]
    dtype: str
    num_parameters: int
    target_length: int


@dataclass(frozen=True)
class _Model:
    """A checkpoint's model: its family, its config, and its parameters' trees."""

    module: ModuleType
    config: Any
    layouts: Any
    shapes: Any

    @property
    def architectures(self) -> tuple[str, ...]:
        return tuple(self.config.architectures())


def write(request: Request) -> Written:
    """Write the model or the adapter, the tokenizer and the configurations.

    Raises:
        ArtifactError: the model has no layout of Hugging Face's, or its factors none of PEFT's.
        CheckpointError: a parameter cannot be read.
    """
    artifact = CheckpointArtifact(Path(request.checkpoint))
    folder = Path(request.folder)
    model = _find_model(artifact)
    arrays = stored_arrays(artifact.path / CHECKPOINT_FOLDER)
    if request.form == "adapter":
        written = _write_adapter(request, artifact, model, arrays)
    else:
        written = _write_model(request, artifact, model, arrays)
    tokenizer = artifact.path / TOKENIZER_FOLDER
    for file in sorted(tokenizer.iterdir()) if tokenizer.is_dir() else ():
        shutil.copyfile(file, folder / file.name)
    return written


def _find_model(artifact: CheckpointArtifact) -> _Model:
    record = artifact.record
    family = record.model.get("family")
    if not isinstance(family, str):
        raise ArtifactError(
            f"the model of recipe '{record.recipe}' is its own and names no model family, so which "
            "of its parameters is which tensor of transformers is not known. Read its parameters "
            "with the recipe, or give the model a family (docs: extend)."
        )
    module = find_model(family)
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
            "(see redco_flow/models/families/t5.py)."
        )
    config = module.Config().updated(record.model["config"])
    if LABELS in record.model:
        config, module = ClassifierConfig.of(family, config, record.model[LABELS]), classifier
    return _Model(module, config, module.tensor_layouts(config), module.abstract_params(config))


def _write_model(
    request: Request,
    artifact: CheckpointArtifact,
    model: _Model,
    arrays: Mapping[str, StoredArray],
) -> Written:
    folder = Path(request.folder)
    params = _parameters(artifact, model, arrays)
    stored = jnp.result_type(*(leaf.dtype for leaf in jax.tree.leaves(params)))
    dtype = jnp.dtype(request.dtype or stored)
    params = jax.tree.map(lambda leaf: replace(leaf, dtype=dtype), params)
    save_params(folder, model.layouts, params, max_file_bytes=request.max_file_bytes)
    values = model.config.to_hugging_face()
    settings = artifact.record.model.get("settings", {})
    if "image_size" in settings:
        values |= _names_of_classes(settings.get("classes") or ())
        write_json(folder / IMAGE_PROCESSOR_FILE, _image_processor(settings))
    # transformers reads parameters as what it finds first, unless it is told.
    write_json(folder / CONFIG_FILE, {**values, "dtype": dtype.name})
    if hasattr(model.module, "decode_step"):
        chosen = {key: values[key] for key in _OF_GENERATION if values.get(key) is not None}
        write_json(folder / GENERATION_FILE, {"_from_model_config": True, **chosen})
    return _written(artifact, model, dtype.name, jax.tree.leaves(params))


def _names_of_classes(classes: Sequence[str | int]) -> dict[str, Any]:
    names = [str(name) for name in classes]
    if not names:
        return {}
    numbered = {str(number): name for number, name in enumerate(names)}
    return {"id2label": numbered, "label2id": {name: int(key) for key, name in numbered.items()}}


def _image_processor(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what transformers' ViTImageProcessor reads, of a recipe's settings of images."""
    size, num_channels = settings["image_size"], settings["num_channels"]
    mean, stddev = (
        settings[name] * (num_channels if len(settings[name]) == 1 else 1)
        for name in ("mean", "stddev")
    )
    return {
        "image_processor_type": "ViTImageProcessor",
        "size": {"height": size, "width": size},
        "resample": _BILINEAR,
        "rescale_factor": 1 / settings["max_value"],
        "image_mean": mean,
        "image_std": stddev,
    }


def _parameters(
    artifact: CheckpointArtifact, model: _Model, arrays: Mapping[str, StoredArray]
) -> Any:
    """Return the model's tree of what is stored under its paths."""
    wanted = {f"params/{join(path)}": leaf for path, leaf in named_leaves(model.shapes)}
    found = {path: array for path, array in arrays.items() if path.startswith("params/")}
    wrong = [
        path
        for path in sorted(wanted.keys() | found.keys())
        if path not in wanted or path not in found or wanted[path].shape != found[path].shape
    ]
    if wrong:
        raise ArtifactError(
            f"{artifact.path}: the parameters are not those that its recipe.json tells of: "
            f"{', '.join(wrong[:10])}."
        )
    return jax.tree.unflatten(jax.tree.structure(model.shapes), [found[path] for path in wanted])


def _write_adapter(
    request: Request,
    artifact: CheckpointArtifact,
    model: _Model,
    arrays: Mapping[str, StoredArray],
) -> Written:
    folder, record = Path(request.folder), artifact.adapter
    if record is None:
        raise ArtifactError(f"{artifact.path} has no {ADAPTER_FILE}: no factors were trained.")
    kernels = _factored_kernels(record, model)
    names = "abm" if record.dora else "ab"
    factors = [
        tuple(arrays[f"{FACTORS}/{kernel.path}/{name}"] for name in names) for kernel in kernels
    ]
    tensors = adapter_tensors(
        [(kernel, *map(np.asarray, parts)) for kernel, parts in zip(kernels, factors, strict=True)]
    )
    save_file(tensors, folder / adapters.TENSORS_FILE, metadata={"format": "pt"})
    config = adapter_config(
        kernels,
        _tensor_names(model),
        rank=record.rank,
        alpha=record.alpha,
        rank_stabilized=record.rank_stabilized,
        dora=record.dora,
        architectures=model.architectures,
        base=request.base,
        revision=request.revision,
    )
    write_json(folder / adapters.CONFIG_FILE, config)
    return _written(artifact, model, "float32", [one for parts in factors for one in parts])


def _factored_kernels(record: AdapterRecord, model: _Model) -> list[FactoredKernel]:
    """Return the kernels that have factors.

    Raises:
        ArtifactError: PEFT has no adapter for one; the message names each.
    """
    layouts = _layouts(model)
    kernels = [
        FactoredKernel(path, layouts[path][0], layouts[path][1].shape, *map(tuple, positions))
        for path, *positions in (
            [target[key] for key in ("path", "stack", "inputs", "outputs")]
            for target in record.targets
        )
    ]
    problems = [kernel.problem or _tied_problem(kernel, model.config) for kernel in kernels]
    if any(problems):
        raise ArtifactError(
            f"PEFT has no adapter for {'; '.join(filter(None, problems))}. Give --merge-lora: the "
            "whole model, with the factors in it."
        )
    return kernels


def _tied_problem(kernel: FactoredKernel, config: Any) -> str | None:
    if "vocabulary" in kernel.layout.dims and getattr(config, "tie_word_embeddings", False):
        return f"{kernel.path}: the embedding and the head are one, and both have the factors"
    return None


def _layouts(model: _Model) -> dict[str, tuple[TensorLayout, Any]]:
    """Return the layout and the shape of each parameter."""
    structure: Any = jax.tree.structure(model.shapes)
    pairs = zip(named_leaves(model.shapes), structure.flatten_up_to(model.layouts), strict=True)
    return {join(path): (layout, leaf) for (path, leaf), layout in pairs}


def _tensor_names(model: _Model) -> list[str]:
    """Return the names of all of the model's tensors."""
    return [
        name
        for layout, leaf in _layouts(model).values()
        for _, name in layout.tensor_names(leaf.shape)
    ]


def _written(
    artifact: CheckpointArtifact, model: _Model, dtype: str, leaves: list[StoredArray]
) -> Written:
    num_parameters = sum(int(np.prod(leaf.shape)) for leaf in leaves)
    return Written(model.architectures, dtype, num_parameters, artifact.record.target_length)


def main() -> None:
    """Do what standard input asks for, and say how it went."""
    request = Request(**json.load(sys.stdin))
    try:
        answer = asdict(write(request))
    except (RedcoFlowError, ValueError, OSError) as error:
        answer = {"error": str(error)}
    sys.stdout.write(f"{json.dumps(answer)}\n")


if __name__ == "__main__":
    main()

"""Write a checkpoint artifact as transformers or PEFT reads it, in a process of its own.

`python -m redco_flow.stages.artifacts.hugging_face` reads an `ExportRequest` as JSON from stdin
and ends with a line of JSON on standard output: a `Written`, or `{"error": …}`. One parameter is in
memory at a time, beside the file that is being filled. Compares no digests: the caller has.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from redco_flow.engine.checkpoint.checkpointer import StoredArray, stored_arrays
from redco_flow.engine.sharding.rules import join, named_leaves
from redco_flow.engine.step.lora import FACTORS
from redco_flow.errors import ArtifactError, RedcoFlowError
from redco_flow.models.classifier import ClassifierConfig
from redco_flow.models.hub import adapters
from redco_flow.models.hub.adapters import FactoredKernel, adapter_config, adapter_tensors
from redco_flow.models.hub.layouts import TensorLayout
from redco_flow.models.hub.model_files import CONFIG_FILE, GENERATION_FILE
from redco_flow.models.hub.tensors import MAX_FILE_BYTES, save_params
from redco_flow.records import write_json
from redco_flow.stages.artifacts.checkpoint import (
    ADAPTER_FILE,
    CHECKPOINT_FOLDER,
    AdapterRecord,
    CheckpointArtifact,
)
from redco_flow.stages.artifacts.dataset import TOKENIZER_FOLDER
from redco_flow.stages.artifacts.export_check import ExportCheck, Exported, check_export
from redco_flow.stages.artifacts.recorded_model import RecordedModel, find_recorded_model
from redco_flow.text.pairs import encode_in_template

IMAGE_PROCESSOR_FILE = "preprocessor_config.json"
_EXAMPLES = ("a text of a few words", "another")
_EXAMPLE_LENGTH = 16
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
class ExportRequest:
    """The checkpoint and format of an export.

    Args:
        checkpoint: the artifact's files.
        folder: where to; exists.
        form: the whole model, or the low-rank factors alone.
        dtype: of the model's parameters; None: the widest that they are stored in.
        base, revision: the hub's name and commit of the model that factors belong to.
        base_folder: that model's directory, where it is not on the hub.
        max_file_bytes: of a safetensors file.
        check_scores: whether scores are computed from what was written.
    """

    checkpoint: str
    folder: str
    form: Literal["model", "adapter"]
    dtype: str | None = None
    base: str | None = None
    revision: str | None = None
    base_folder: str | None = None
    max_file_bytes: int = MAX_FILE_BYTES
    check_scores: bool = True


@dataclass(frozen=True)
class Written:
    """The written files, for a model card.

    Args:
        architectures: transformers' classes.
        dtype: of the parameters.
        num_parameters: of the model, or of the factors.
        target_length: tokens of the longest target in training.
        base_options: what `from_pretrained` of an adapter's base needs besides its name.
        check: how the files were compared with the checkpoint; None: not yet.
    """

    architectures: tuple[str, ...]
    dtype: str
    num_parameters: int
    target_length: int
    base_options: dict[str, Any] = field(default_factory=dict)
    check: ExportCheck | None = None


def write_checked(request: ExportRequest) -> Written:
    """Write a checkpoint, and load what was written once.

    Raises:
        ArtifactError: as `write`, or the files do not give the checkpoint's scores.
        CheckpointError: a parameter cannot be read.
    """
    written = write(request)
    artifact = CheckpointArtifact(Path(request.checkpoint))
    model = find_recorded_model(artifact.record.recipe, artifact.record.model)
    arrays = stored_arrays(artifact.path / CHECKPOINT_FOLDER)
    params = _parameters(artifact, model, arrays)
    adapter, record = None, artifact.adapter
    if request.form == "adapter" and record is not None:
        adapter = _adapter_tensors(record, model, arrays)
    else:
        params = jax.tree.map(lambda leaf: replace(leaf, dtype=jnp.dtype(written.dtype)), params)
    exported = Exported(
        Path(request.folder),
        model,
        params,
        adapter,
        base=request.base_folder or request.base,
        revision=request.revision,
        base_options=written.base_options,
        is_exact=adapter is None or (record is not None and record.base_dtype == "float32"),
        texts=_example_texts(artifact, model.config),
    )
    return replace(written, check=check_export(exported, with_scores=request.check_scores))


def _example_texts(artifact: CheckpointArtifact, config: Any) -> list[np.ndarray] | None:
    """Return token ids of texts of two lengths, for a model that classifies texts."""
    if not isinstance(config, ClassifierConfig):
        return None
    length = int(min(_EXAMPLE_LENGTH, config.max_length))
    encoded = encode_in_template(_EXAMPLES, artifact.tokenizer, length)
    return [np.asarray(row, np.int32) for row in encoded.source_ids]


def write(request: ExportRequest) -> Written:
    """Write the model or the adapter, the tokenizer and the configurations.

    Raises:
        ArtifactError: the model has no layout of Hugging Face's, or its factors none of PEFT's.
        CheckpointError: a parameter cannot be read.
    """
    artifact = CheckpointArtifact(Path(request.checkpoint))
    folder = Path(request.folder)
    model = find_recorded_model(artifact.record.recipe, artifact.record.model)
    arrays = stored_arrays(artifact.path / CHECKPOINT_FOLDER)
    if request.form == "adapter":
        written = _write_adapter(request, artifact, model, arrays)
    else:
        written = _write_model(request, artifact, model, arrays)
    settings = artifact.record.model.get("settings", {})
    if "image_size" in settings:
        write_json(folder / IMAGE_PROCESSOR_FILE, _image_processor(settings))
    tokenizer = artifact.path / TOKENIZER_FOLDER
    for file in sorted(tokenizer.iterdir()) if tokenizer.is_dir() else ():
        shutil.copyfile(file, folder / file.name)
    return written


def _write_model(
    request: ExportRequest,
    artifact: CheckpointArtifact,
    model: RecordedModel,
    arrays: Mapping[str, StoredArray],
) -> Written:
    folder = Path(request.folder)
    params = _parameters(artifact, model, arrays)
    stored = jnp.result_type(*(leaf.dtype for leaf in jax.tree.leaves(params)))
    dtype = jnp.dtype(request.dtype or stored)
    if dtype == jnp.float16 != stored:
        _check_range(params, float(jnp.finfo(dtype).max))
    params = jax.tree.map(lambda leaf: replace(leaf, dtype=dtype), params)
    save_params(folder, model.layouts, params, max_file_bytes=request.max_file_bytes)
    values = model.config.to_hugging_face()
    if "image_size" in artifact.record.model.get("settings", {}):
        values |= _names_of_classes(_classes(artifact))
    # transformers reads parameters in the dtype that it finds first, unless one is given.
    write_json(folder / CONFIG_FILE, {**values, "dtype": dtype.name})
    if hasattr(model.module, "decode_step"):
        chosen = {key: values[key] for key in _OF_GENERATION if values.get(key) is not None}
        write_json(folder / GENERATION_FILE, {"_from_model_config": True, **chosen})
    return _written(artifact, model, dtype.name, jax.tree.leaves(params))


def _check_range(params: Any, largest: float) -> None:
    """Refuse parameters that would overflow, whose scores would be NaN."""
    for path, leaf in named_leaves(params):
        size = float(np.abs(np.asarray(leaf, np.float32)).max(initial=0))
        if largest < size < np.inf:
            raise ArtifactError(
                f"{join(path)} has values of up to {size:.4g}, and float16 ends at {largest:,.0f}: "
                "give --dtype bfloat16, or float32."
            )


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
    artifact: CheckpointArtifact, model: RecordedModel, arrays: Mapping[str, StoredArray]
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
    request: ExportRequest,
    artifact: CheckpointArtifact,
    model: RecordedModel,
    arrays: Mapping[str, StoredArray],
) -> Written:
    folder, record = Path(request.folder), artifact.adapter
    if record is None:
        raise ArtifactError(f"{artifact.path} has no {ADAPTER_FILE}: no factors were trained.")
    kernels = _factored_kernels(record, model)
    full = _trained_in_full(record, model)
    tensors = _adapter_tensors(record, model, arrays)
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
        full=_tensor_names(model, full),
        renamings=model.module_renamings,
    )
    write_json(folder / adapters.CONFIG_FILE, config)
    options = _options_of_base(artifact, model)
    return _written(artifact, model, "float32", list(tensors.values()), options)


def _adapter_tensors(
    record: AdapterRecord, model: RecordedModel, arrays: Mapping[str, StoredArray]
) -> dict[str, np.ndarray]:
    """Return what an adapter's file holds: factors, and what was trained in full."""
    names = "abm" if record.dora else "ab"
    factors = [
        (kernel, *(np.asarray(arrays[f"{FACTORS}/{kernel.path}/{name}"]) for name in names))
        for kernel in _factored_kernels(record, model)
    ]
    full = [
        (model.parameters[path][0], np.asarray(arrays[f"params/{path}"]))
        for path in _trained_in_full(record, model)
    ]
    return adapter_tensors(factors, full, model.module_renamings)


def _trained_in_full(record: AdapterRecord, model: RecordedModel) -> tuple[str, ...]:
    """Paths of what an adapter has as it is; of older trainings the head, which was drawn."""
    return model.head if record.full is None else tuple(record.full)


def _options_of_base(artifact: CheckpointArtifact, model: RecordedModel) -> dict[str, Any]:
    """Return what transformers' `from_pretrained` needs to make the adapter's model of its base."""
    options: dict[str, Any] = {}
    if model.head:
        # The base may have a head of other labels, which the adapter's replaces.
        options["ignore_mismatched_sizes"] = True
        values = model.config.to_hugging_face() | _names_of_classes(_classes(artifact))
        wanted = ("id2label", "label2id", "problem_type", "pad_token_id")
        options |= {key: values[key] for key in wanted if values.get(key) is not None}
    return options


def _classes(artifact: CheckpointArtifact) -> Sequence[str | int]:
    """Names of the classes, where the recipe's settings have some."""
    found = artifact.record.model.get("settings", {}).get("classes")
    return found or ()


def _factored_kernels(record: AdapterRecord, model: RecordedModel) -> list[FactoredKernel]:
    """Return the kernels that have factors, but for those that the adapter has as they are."""
    full = _trained_in_full(record, model)
    kernels = [
        _factored_kernel(target, *model.parameters[target["path"]])
        for target in record.targets
        if target["path"] not in full
    ]
    problems = [kernel.problem or _tied_problem(kernel, model.config) for kernel in kernels]
    if any(problems):
        raise ArtifactError(
            f"PEFT has no adapter for {'; '.join(filter(None, problems))}. Give --merge-lora: the "
            "whole model, with the factors in it."
        )
    return kernels


def _factored_kernel(target: Mapping[str, Any], layout: TensorLayout, leaf: Any) -> FactoredKernel:
    stack, inputs, outputs = (tuple(target[key]) for key in ("stack", "inputs", "outputs"))
    found = target.get("parts")
    parts = None if found is None else (found[0], tuple(found[1]))
    return FactoredKernel(target["path"], layout, leaf.shape, stack, inputs, outputs, parts)


def _tied_problem(kernel: FactoredKernel, config: Any) -> str | None:
    if "vocabulary" in kernel.layout.dims and getattr(config, "tie_word_embeddings", False):
        return f"{kernel.path}: the embedding and the head are one, and both have the factors"
    return None


def _tensor_names(model: RecordedModel, paths: Iterable[str] | None = None) -> list[str]:
    """Return the names of the tensors of some parameters; None: of all."""
    chosen = model.parameters if paths is None else paths
    return [
        name
        for layout, leaf in (model.parameters[path] for path in chosen)
        for _, name in layout.tensor_names(leaf.shape)
    ]


def _written(
    artifact: CheckpointArtifact,
    model: RecordedModel,
    dtype: str,
    leaves: Sequence[StoredArray | np.ndarray],
    base_options: Mapping[str, Any] | None = None,
) -> Written:
    num_parameters = sum(int(np.prod(leaf.shape)) for leaf in leaves)
    length = artifact.record.target_length
    return Written(model.architectures, dtype, num_parameters, length, dict(base_options or {}))


def main() -> None:
    """Do what standard input asks for, and say how it went."""
    request = ExportRequest(**json.load(sys.stdin))
    try:
        answer = asdict(write_checked(request))
    except (RedcoFlowError, ValueError, OSError) as error:
        answer = {"error": str(error)}
    sys.stdout.write(f"{json.dumps(answer)}\n")


if __name__ == "__main__":
    main()

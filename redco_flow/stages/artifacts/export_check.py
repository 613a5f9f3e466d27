"""Load an export once, before its model card states a score: are these the checkpoint's outputs?

Tensors are read back and compared bit by bit. Then transformers (with PEFT, of an adapter) loads
the files, and its scores of a few example inputs are compared with the checkpoint's own; where they
are not installed, our own reader does. `MAX_PARAMETERS` bounds the time and memory of that.
Dims in this file: B batch, T tokens, X image side, C channels.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import inspect
import resource
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from safetensors.numpy import load_file

from redco_flow.errors import ArtifactError
from redco_flow.hub import whole_download
from redco_flow.models.classifier import ClassifierConfig
from redco_flow.models.hub import adapters
from redco_flow.models.hub.model_files import CONFIG_FILE, has_weights
from redco_flow.models.hub.tensors import TensorFiles, named_tensors
from redco_flow.records import read_json
from redco_flow.stages.artifacts.recorded_model import RecordedModel

MAX_PARAMETERS = 1_500_000_000
"""Of the largest model whose scores are compared."""
TOLERANCE = 1e-3
"""How far scores may differ, as a share of the largest; a new head differs by all of it."""

_NUM_INPUTS, _LENGTH, _SEED = 2, 6, 0
# Ours, the reader's, and what loading takes for a while; float32.
_BYTES_PER_PARAMETER = 12
_BASE_PATTERNS = (CONFIG_FILE, "model*.safetensors", "model.safetensors.index.json")


@dataclass(frozen=True)
class ExportCheck:
    """The compared files and values, for a model card.

    Args:
        num_tensors: that were read back bit by bit.
        reader: what computed scores from the files; empty: nothing did.
        left_out: why nothing did.
        num_inputs: example inputs that were scored.
        difference, scale: the largest difference of two scores, and the largest score.
        is_exact: whether the two had to agree; not where the frozen kernels were rounded.
    """

    num_tensors: int
    reader: str = ""
    left_out: str = ""
    num_inputs: int = 0
    difference: float = 0.0
    scale: float = 0.0
    is_exact: bool = True


@dataclass(frozen=True)
class Exported:
    """An export whose files are all there.

    Args:
        folder: where.
        model, params: the checkpoint's, of whose parameters leaves are read when they are needed.
        adapter: the tensors of an adapter; None: it is a whole model.
        base, revision: what an adapter belongs to: a directory, or a name on the hub; None where
            that is not known.
        base_options: what transformers makes the base with.
        is_exact: whether an adapter's base is what was trained, and not rounded.
        texts: token ids of a few texts, as the recipe encodes them; None: random ids.
    """

    folder: Path
    model: RecordedModel
    params: Any
    adapter: Mapping[str, np.ndarray] | None = None
    base: str | None = None
    revision: str | None = None
    base_options: Mapping[str, Any] | None = None
    is_exact: bool = True
    texts: Sequence[np.ndarray] | None = None


def check_export(exported: Exported, *, with_scores: bool = True) -> ExportCheck:
    """Compare an export's files with the checkpoint that they were made of.

    Args:
        with_scores: False compares the tensors alone.

    Raises:
        ArtifactError: they differ, or cannot be loaded; the message says what.
    """
    num_tensors = _read_back(exported)
    if not with_scores:
        return ExportCheck(num_tensors, left_out="the process that computed them was killed")
    size = sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(exported.params))
    if size > MAX_PARAMETERS or size * _BYTES_PER_PARAMETER > _free_memory_bytes():
        return ExportCheck(num_tensors, left_out="the model is too large to be run for it")
    reader, left_out = _choose_reader(exported)
    inputs = _example_inputs(exported)
    if inputs is None or not reader:
        return ExportCheck(num_tensors, left_out=left_out or "its inputs are not known")
    params = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf), jnp.float32), exported.params)
    expected = _scores(exported.model, exported.model.config, params, inputs)
    if not np.isfinite(expected).all():
        return ExportCheck(num_tensors, left_out="the checkpoint's own scores are not finite")
    try:
        if reader == _OWN_READER:
            found = _scores(exported.model, _written_config(exported), params, inputs)
        else:
            found = _their_scores(exported, reader, inputs)
    except ImportError as error:
        return ExportCheck(num_tensors, left_out=f"{reader} did not import: {error}")
    difference, scale = _compare(found, expected, reader, is_exact=exported.is_exact)
    return ExportCheck(
        num_tensors,
        reader,
        "",
        len(next(iter(inputs.values()))),
        difference,
        scale,
        is_exact=exported.is_exact,
    )


def _free_memory_bytes() -> int:
    """Memory that this process may still take; a cgroup's limit is not known here."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    free = int(psutil.virtual_memory().available)
    if limit == resource.RLIM_INFINITY:
        return free
    return min(free, limit - int(psutil.Process().memory_info().vms))


def _read_back(exported: Exported) -> int:
    """Return the number of tensors in the files, each of which is the checkpoint's."""
    if exported.adapter is not None:
        found = load_file(exported.folder / adapters.TENSORS_FILE)
        wrong = [name for name, one in exported.adapter.items() if not _equal(found.get(name), one)]
        _refuse_tensors([*wrong, *(found.keys() - exported.adapter.keys())])
        return len(found)
    expected = set()
    with TensorFiles(exported.folder) as files:
        for name, values in named_tensors(exported.model.layouts, exported.params):
            expected.add(name)
            is_there = name in files.names
            _refuse_tensors([] if is_there and _equal(files.read(name), values) else [name])
        _refuse_tensors(sorted(files.names - expected))
    return len(expected)


def _equal(found: np.ndarray | None, expected: np.ndarray) -> bool:
    if found is None or (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return False
    bits = np.dtype(f"u{found.dtype.itemsize}")  # NaN equals itself, and -0 is not 0
    one, other = (np.ascontiguousarray(values).view(bits) for values in (found, expected))
    return np.array_equal(one, other)


def _refuse_tensors(names: list[str]) -> None:
    if names:
        raise ArtifactError(
            f"the files that were written do not have the checkpoint's tensors: "
            f"{', '.join(names[:10])} differ."
        )


_OWN_READER = "redco-flow"


def _choose_reader(exported: Exported) -> tuple[str, str]:
    """Return what is to load the files, and why nothing does."""
    import_names = ["transformers", "torch", *(["peft"] if exported.adapter is not None else [])]
    absent = [name for name in import_names if importlib.util.find_spec(name) is None]
    if exported.adapter is not None:
        if absent:
            return "", f"{' and '.join(absent)} were not installed"
        if _base_folder(exported) is None:
            return "", "the model that it belongs to was not on that machine"
    elif absent:
        return _OWN_READER, ""
    try:
        is_known = _is_known_to_transformers(exported.model)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:  # broken or too old
        left_out = f"{' and '.join(import_names)} did not import: {error}"
        return ("", left_out) if exported.adapter is not None else (_OWN_READER, "")
    if not is_known and exported.adapter is None:
        return _OWN_READER, ""
    named = [name for name in import_names if name != "torch"]
    return " and ".join(f"{name} {importlib.metadata.version(name)}" for name in named), ""


def _is_known_to_transformers(model: RecordedModel) -> bool:
    import torch  # noqa: F401 (transformers imports without it, and then loads no model)
    import transformers

    return hasattr(transformers, model.architectures[0])


def _base_folder(exported: Exported) -> Path | None:
    """Return the directory of the model that an adapter belongs to, where it is here."""
    if exported.base is None:
        return None
    if Path(exported.base).is_dir():
        folder: Path | None = Path(exported.base)
    elif exported.revision is None:
        return None
    else:
        folder = whole_download("model", exported.base, exported.revision, _BASE_PATTERNS)
    return folder if folder and has_weights(folder) else None


def _example_inputs(exported: Exported) -> dict[str, np.ndarray] | None:
    """Return inputs by our functions' arguments; None: what they are is not known."""
    model = exported.model
    if exported.texts is not None:
        return _padded(exported.texts, model.config)
    # Families of language models name their inputs there; `apply` hands all of them on.
    forward = getattr(model.module, "apply_before_head", model.module.apply)
    taken = inspect.signature(forward).parameters
    config, random = model.config, np.random.default_rng(_SEED)
    images_of = getattr(config, "encoder", config)
    if not hasattr(images_of, "image_size"):
        inputs = {"input_ids": _ids(config, random)}
    else:
        size, channels = images_of.image_size, images_of.num_channels
        images = random.uniform(-1, 1, (_NUM_INPUTS, size, size, channels)).astype(np.float32)
        inputs = {"images" if "images" in taken else "input_ids": images}
    if "decoder_input_ids" in taken:
        length = _LENGTH
        if "image_size" in vars(images_of):
            length = config.core.encoder.num_patches + 1
        inputs["attention_mask"] = np.ones((_NUM_INPUTS, length), np.int32)
        inputs["decoder_input_ids"] = _ids(config, random)
    return inputs if all(name in taken for name in inputs) else None


def _ids(config: Any, random: np.random.Generator) -> np.ndarray:
    """Token ids (B, T) of which none is padding."""
    fill = getattr(config, "filler_token_id", getattr(config, "pad_token_id", None))
    known = [number for number in range(config.vocab_size) if number != fill]
    return random.choice(known, (_NUM_INPUTS, _LENGTH)).astype(np.int32)


def _padded(texts: Sequence[np.ndarray], config: ClassifierConfig) -> dict[str, np.ndarray]:
    width = max(map(len, texts))
    ids = np.full((len(texts), width), config.inner.filler_token_id, np.int32)
    mask = np.zeros((len(texts), width), np.int32)
    for row, text in enumerate(texts):
        ids[row, : len(text)], mask[row, : len(text)] = text, 1
    return {"input_ids": ids, "attention_mask": mask}


def _gives_hidden_states(config: Any) -> bool:
    """Whether the model has no head, and what it computes are states of tokens."""
    if isinstance(config, ClassifierConfig):
        return False
    return not getattr(config, "has_head", getattr(config, "has_classifier", True))


def _scores(
    model: RecordedModel, config: Any, params: Any, inputs: Mapping[str, np.ndarray]
) -> np.ndarray:
    function = model.module.encode if _gives_hidden_states(config) else model.module.apply
    run = jax.jit(lambda params, inputs: function(config, params, **inputs))
    with jax.default_matmul_precision("highest"):
        return np.asarray(run(params, dict(inputs)), np.float32)


def _written_config(exported: Exported) -> Any:
    """Return the configuration that our reader makes of the written `config.json`."""
    values = read_json(exported.folder / CONFIG_FILE)
    config = exported.model.config
    if not isinstance(config, ClassifierConfig):
        return _with_heads_of(config, type(config).from_hugging_face(values))
    inner = _with_heads_of(config.inner, type(config.inner).from_hugging_face(values))
    labels = [values["id2label"][str(number)] for number in range(config.num_outputs)]
    return ClassifierConfig.of(config.family, inner, labels if config.labels else ())


def _with_heads_of(config: Any, found: Any) -> Any:
    """Return the configuration with the heads that files tell, and no config.json does."""
    names = ("has_head", "has_pooler", "has_classifier", "num_labels")
    return found.updated({key: getattr(config, key) for key in names if hasattr(config, key)})


def _their_scores(exported: Exported, reader: str, inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return what transformers computes, in float32."""
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    is_of_images = "images" in inputs or inputs["input_ids"].ndim > 2
    given = {name: torch.from_numpy(values) for name, values in inputs.items()}
    if is_of_images:
        images = given.pop("images" if "images" in given else "input_ids")
        given["pixel_values"] = images.permute(0, 3, 1, 2).contiguous()
        given.pop("attention_mask", None)
    try:
        # Standard output is for the answer to the process that asked for the export.
        with (
            contextlib.redirect_stdout(sys.stderr),
            warnings.catch_warnings(),
            torch.no_grad(),
        ):
            warnings.simplefilter("ignore")
            found = _load(exported)(**given)
    except (ArtifactError, ImportError):
        raise
    except Exception as error:
        raise ArtifactError(
            f"{reader} cannot use the files that were written: {type(error).__name__}: {error}."
        ) from error
    has_scores = not _gives_hidden_states(exported.model.config)
    scores: np.ndarray = (found.logits if has_scores else found.last_hidden_state).numpy()
    return scores


def _load(exported: Exported) -> Any:
    """Return the model as the lines of the model card load it, in float32."""
    import torch
    import transformers

    architecture = getattr(transformers, exported.model.architectures[0])
    if exported.adapter is None:
        model, told = architecture.from_pretrained(
            exported.folder,
            dtype=torch.float32,
            output_loading_info=True,
            trust_remote_code=False,
        )
        # Such as a pooler that the model does not use: transformers draws one.
        unused = getattr(exported.model.module, "IGNORED_TENSORS", ())
        told["missing_keys"] = [
            key for key in told["missing_keys"] if not any(fnmatchcase(key, one) for one in unused)
        ]
        kinds = ("missing_keys", "unexpected_keys", "mismatched_keys")
        wrong = sorted(f"{kind.partition('_')[0]} {key}" for kind in kinds for key in told[kind])
        if wrong:
            raise ArtifactError(
                f"transformers misses tensors, or finds others: {', '.join(wrong[:10])}."
            )
        return model.eval()
    from peft import PeftModel

    options = {**(exported.base_options or {})}
    if "id2label" in options:
        options["id2label"] = {int(key): name for key, name in options["id2label"].items()}
    base = architecture.from_pretrained(
        _base_folder(exported), dtype=torch.float32, trust_remote_code=False, **options
    )
    return PeftModel.from_pretrained(base, str(exported.folder)).eval()


def _compare(
    found: np.ndarray, expected: np.ndarray, reader: str, *, is_exact: bool
) -> tuple[float, float]:
    """Return the largest difference and the largest score."""
    if found.shape != expected.shape:
        raise ArtifactError(
            f"{reader} computes scores of shape {found.shape} from the files that were written, "
            f"and the checkpoint's are {expected.shape}."
        )
    difference = float(np.abs(found - expected).max())
    scale = float(np.abs(expected).max())
    if is_exact and not difference <= TOLERANCE * max(scale, TOLERANCE):
        raise ArtifactError(
            f"the scores that {reader} computes from the files that were written differ from the "
            f"checkpoint's by up to {difference:.3g}, where the largest is {scale:.3g}: for the "
            "same inputs they should be equal. Please report this as a fault of redco-flow."
        )
    return difference, scale

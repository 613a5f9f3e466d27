"""The README.md of an exported checkpoint: what it is, how it was made, how good it is.

Names no directory, host or user: what stands here goes to everybody.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from redco_flow import __version__
from redco_flow.tracking.artifacts import Artifact
from redco_flow.tracking.lineage_nodes import LineageNode, Production

_HUB_DATASETS = "hub:datasets/"
_MOST_DATA = 10
_SHORT = 12
_TASKS = {
    "CausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForSequenceClassification": "text-classification",
}
# Said elsewhere in the card, or of no interest to who loads the model.
_LEFT_OUT = ("kind", "recipe", "dataset", "checkpoint", "model.name_or_path", "model.revision")


@dataclass(frozen=True)
class Base:
    """The model that a training began with, where it has a name on the hub.

    Args:
        revision: the commit.
    """

    name: str
    revision: str | None


@dataclass(frozen=True)
class CardFacts:
    """What a model card says.

    Args:
        checkpoint: the artifact.
        lineage: where it came from.
        evaluations: what evaluations of it found (`tracking.metrics_artifact.MetricsSummary`).
        form: the whole model, or the low-rank factors alone.
        base: what it was trained from.
        written: what was written (`stages.artifacts.hugging_face.Written`).
    """

    checkpoint: Artifact
    lineage: LineageNode
    evaluations: tuple[Mapping[str, Any], ...]
    form: Literal["model", "adapter"]
    base: Base | None
    written: Mapping[str, Any]

    @property
    def name(self) -> str:
        """What the pipeline is called."""
        made = self.lineage.production
        return (made.pipeline if made else "") or "model"


def model_card(facts: CardFacts) -> str:
    """Return the README.md: the hub's metadata, then Markdown."""
    sections = (
        _summary(facts),
        _loading(facts),
        _scores(facts),
        _check(facts.written["check"]),
        _training(facts),
        _data(facts.lineage),
        _origin(facts),
    )
    body = "\n\n".join("\n".join(lines) for lines in map(list, sections) if lines)
    return f"---\n{_metadata(facts)}\n---\n\n{body}\n"


def _metadata(facts: CardFacts) -> str:
    """The YAML of the card, as huggingface_hub writes it."""
    from huggingface_hub import EvalResult, ModelCardData

    results = [
        EvalResult(
            task_type=_task(facts) or "text2text-generation",
            dataset_type=next(iter(_datasets(facts.lineage)), facts.name),
            dataset_name=f"{facts.name}, {one.get('split', '?')} split",
            metric_type=key,
            metric_value=value,
        )
        for one in facts.evaluations[-1:]
        for key, value in (one.get("metrics") or {}).items()
    ]
    is_adapter = facts.form == "adapter"
    relation: dict[str, Any] = {"base_model_relation": "adapter" if is_adapter else "finetune"}
    card = ModelCardData(
        library_name="peft" if is_adapter else "transformers",
        base_model=facts.base.name if facts.base else None,
        datasets=_datasets(facts.lineage) or None,
        metrics=[result.metric_type for result in results] or None,
        pipeline_tag=_task(facts),
        tags=["redco-flow"],
        model_name=facts.name if results else None,
        eval_results=results or None,
        **(relation if facts.base else {}),
    )
    return str(card.to_yaml())


def _task(facts: CardFacts) -> str | None:
    classes = facts.written["architectures"]
    found = (task for end, task in _TASKS.items() for one in classes if one.endswith(end))
    return next(found, None)


def _datasets(lineage: LineageNode) -> list[str]:
    """Names of the hub's datasets."""
    names = dict.fromkeys(leaf.name for leaf in lineage.leaves() if leaf.type == "data")
    return [name.removeprefix(_HUB_DATASETS) for name in names if name.startswith(_HUB_DATASETS)]


def _summary(facts: CardFacts) -> Iterator[str]:
    written = facts.written
    classes = ", ".join(f"`{name}`" for name in written["architectures"])
    what = "Low-rank factors (LoRA) for" if facts.form == "adapter" else "A"
    yield f"# {facts.name}\n"
    yield f"{what} {classes}: {written['num_parameters']:,} parameters in {written['dtype']}."
    if facts.base is not None:
        at = f" at `{facts.base.revision}`" if facts.base.revision else ""
        yield f"Trained from `{facts.base.name}`{at}."
    elif facts.form == "adapter":
        yield "The model that they belong to was a local directory and has no name here."


def _loading(facts: CardFacts) -> Iterator[str]:
    yield "## How to load it\n"
    yield "```python"
    yield from _program(facts)
    yield "```"


def _program(facts: CardFacts) -> Iterator[str]:
    here = '"."  # this directory, or its name on the hub'
    architecture = next(iter(facts.written["architectures"]), "AutoModel")
    recipe = facts.checkpoint.metadata.get("recipe")
    readers = [("AutoTokenizer", "tokenizer")] if recipe != "image_classification" else []
    if recipe in ("image_classification", "image_to_text"):
        readers.append(("AutoImageProcessor", "images"))
    yield "import torch"
    if facts.form == "adapter":
        yield "from peft import PeftModel"
    names = [reader for reader, _ in readers]
    yield f"from transformers import {', '.join([*names, architecture])}\n"
    yield f"path = {here}"
    yield from (f"{name} = {reader}.from_pretrained(path)" for reader, name in readers)
    if facts.form == "adapter":
        yield f"model = {architecture}.from_pretrained("
        yield from (f"    {argument}" for argument in _base_arguments(facts))
        yield ")"
        yield "model = PeftModel.from_pretrained(model, path)"
    else:
        yield f"model = {architecture}.from_pretrained(path)"
    yield from _generation(facts)


def _base_arguments(facts: CardFacts) -> Iterator[str]:
    """What `from_pretrained` of an adapter's base is called with, as Python."""
    yield (
        f"{facts.base.name!r}," if facts.base else '"the model that was trained",  # its directory'
    )
    if facts.base and facts.base.revision:
        yield f"revision={facts.base.revision!r},"
    yield f"dtype=torch.{facts.written['dtype']},"
    for key, value in facts.written["base_options"].items():
        if key == "id2label":
            value = {int(number): name for number, name in value.items()}
        yield f"{key}={value!r},"


def _generation(facts: CardFacts) -> Iterator[str]:
    """How the recipe makes a model's input of a text, where it is one of ours."""
    recipe = facts.checkpoint.metadata.get("recipe")
    if recipe in ("classification", "regression"):
        yield "scores = model(**tokenizer('...', return_tensors='pt')).logits[0]"
        found = "model.config.id2label[int(scores.argmax())]"
        yield f"print({found if recipe == 'classification' else 'float(scores)'})"
    if recipe == "image_classification":
        yield "scores = model(**images(image, return_tensors='pt')).logits[0]"
        yield "print(model.config.id2label[int(scores.argmax())])"
    if recipe == "image_to_text":
        yield "output = model.generate(**images(image, return_tensors='pt'), max_new_tokens=32)[0]"
        yield "print(tokenizer.decode(output, skip_special_tokens=True))"
    if recipe not in ("text_to_text", "language_modeling", "preference"):
        return
    settings = _settings_of(_preprocessing(facts.lineage))
    prefix = str(settings.get("data.source_prefix") or "")
    suffix = str(settings.get("data.source_suffix") or "")
    yield f"text = {prefix!r} + {'...'!r}" if prefix else f"text = {'...'!r}"
    if recipe == "text_to_text":
        yield "ids = tokenizer(text, add_special_tokens=False).input_ids"
    else:
        yield "ids = tokenizer(text).input_ids"
    if suffix:
        yield f"ids += tokenizer({suffix!r}, add_special_tokens=False).input_ids"
    if recipe == "text_to_text":
        yield "ids.append(tokenizer.eos_token_id)"
    length = facts.written["target_length"]
    yield f"output = model.generate(torch.tensor([ids]), max_new_tokens={length})[0]"
    yield "print(tokenizer.decode(output, skip_special_tokens=True))"


def _preprocessing(lineage: LineageNode) -> Production | None:
    made = (node.production for node in lineage.walk())
    return next((one for one in made if one is not None and one.kind == "preprocess"), None)


def _settings_of(made: Production | None) -> dict[str, Any]:
    return {leaf.key: leaf.value for leaf in made.config} if made else {}


def _scores(facts: CardFacts) -> Iterator[str]:
    own = facts.checkpoint.metadata.get("metrics") or {}
    if not facts.evaluations and not own:
        return
    yield "## How good it is\n"
    for one in facts.evaluations:
        baselines = {
            name: found.get("metrics") or {} for name, found in (one.get("baselines") or {}).items()
        }
        yield f"On {one.get('num_examples', '?')} examples of the {one.get('split', '?')} split:\n"
        titles = [name.replace("_", " ") for name in baselines]
        yield from _table(
            ["metric", "this model", *titles],
            [
                [key, _number(value), *(_number(scores.get(key)) for scores in baselines.values())]
                for key, value in (one.get("metrics") or {}).items()
            ],
        )
        if baselines:
            yield (
                "\nThe other columns are trivial: they always say the most frequent target of the "
                "training, or the targets' mean, or repeat their source.\n"
            )
    if own:
        scores = {key.removeprefix("val/"): value for key, value in own.items()}
        listed = ", ".join(f"{key} {_number(value)}" for key, value in scores.items())
        yield f"On the validation split at step {facts.checkpoint.metadata.get('step')}: {listed}."


def _table(head: list[str], rows: list[list[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "–"


def _check(found: Mapping[str, Any]) -> Iterator[str]:
    """How the files were compared with the checkpoint that was scored."""
    yield "## How the files were checked\n"
    yield f"All {found['num_tensors']} tensors were read back, bit for bit the checkpoint's."
    if not found["reader"]:
        yield f"No scores were computed from them: {found['left_out']}."
        return
    yield (
        f"{found['reader']} loaded the files and scored {found['num_inputs']} example inputs: the "
        f"scores differ from the checkpoint's by at most {found['difference']:.1e}; the largest "
        f"score is {found['scale']:.3g}."
    )
    if not found["is_exact"]:
        yield (
            "The training rounded the frozen kernels (`frozen_dtype`, `lora.base_dtype`), which "
            "the base model above does not have, so the two need not agree."
        )


def _training(facts: CardFacts) -> Iterator[str]:
    made = facts.lineage.production
    if made is None:
        return
    yield "## How it was trained\n"
    yield (
        f"By redco-flow {made.versions.get('redco-flow', __version__)}: pipeline "
        f"`{made.pipeline}`, stage `{made.stage}`, run `{made.run}`, step "
        f"{facts.checkpoint.metadata.get('step')}."
    )
    for one in (_preprocessing(facts.lineage), made):
        settings = list(_written_settings(one)) if one else []
        if one is not None and settings:
            yield f"\nSettings of stage `{one.stage}` that are not the defaults:\n\n```yaml"
            yield from settings
            yield "```"
    used = ("python", "jax", "flax", "optax", "transformers", "tokenizers")
    versions = [f"{name} {made.versions[name]}" for name in used if name in made.versions]
    yield f"\nWith {', '.join(versions)}." if versions else ""


def _written_settings(made: Production) -> Iterator[str]:
    for leaf in made.config:
        if leaf.source != "default" and leaf.key not in _LEFT_OUT and leaf.value is not None:
            yield f"{leaf.key}: {json.dumps(_public(leaf.value), ensure_ascii=False)}"


def _public(value: Any) -> Any:
    """A setting's value, of a path on a disk its last part alone."""
    if isinstance(value, Mapping):
        return {key: _public(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_public(inner) for inner in value]
    is_path = isinstance(value, str) and value.startswith(("/", "~", "./", "../"))
    return f"…/{Path(value).name}" if is_path else value


def _data(lineage: LineageNode) -> Iterator[str]:
    data = [leaf for leaf in lineage.leaves() if leaf.type == "data"]
    if not data:
        return
    yield "## Data\n"
    for leaf in data[:_MOST_DATA]:
        is_of_hub = leaf.name.startswith("hub:")
        name = leaf.name.partition("/")[2] if is_of_hub else Path(leaf.name).name
        yield f"- `{name}`, {'commit' if is_of_hub else 'BLAKE3'} `{leaf.id}`"
    if len(data) > _MOST_DATA:
        yield f"- and {len(data) - _MOST_DATA} more files"
    for node in lineage.walk():
        if node.type == "artifact" and node.name == "dataset":
            yield f"\nAs prepared for the training: dataset artifact `{node.id}`."
            return


def _origin(facts: CardFacts) -> Iterator[str]:
    made = facts.lineage.production
    yield "## Where it comes from\n"
    yield f"- checkpoint artifact `{facts.checkpoint.id}`"
    if made is None:
        return
    yield f"- fingerprint of the training `{made.fingerprint}`"
    commit = str(made.code.get("commit") or "")
    changed = ""
    if made.code.get("dirty"):
        changed = (
            f", with uncommitted changes `{str(made.code.get('patch_digest') or '')[:_SHORT]}`"
        )
    yield f"- code: {f'commit `{commit}`{changed}' if commit else 'no git commit'}"

"""The README.md of an exported checkpoint, a template: what it is, how it was made, its scores.

Names no directory, host or user: it may be published.
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
_VERSIONS = ("python", "jax", "flax", "optax", "transformers", "tokenizers")
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
    """The facts that a model card states.

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
        """The pipeline's name."""
        made = self.lineage.production
        return (made.pipeline if made else "") or "model"


def model_card(facts: CardFacts) -> str:
    """Return the README.md: the hub's metadata, then Markdown."""
    # Imported here: it takes a while, and other verbs import this module.
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,  # noqa: S701 (Markdown)
    )
    environment.filters.update(py=repr, number=_number)
    template = environment.get_template("model_card.md.jinja")
    record, made = facts.checkpoint.metadata, facts.lineage.production
    preprocessing = _preprocessing(facts.lineage)
    settings = {leaf.key: leaf.value for leaf in preprocessing.config} if preprocessing else {}
    stages = [(one.stage, list(_written_settings(one))) for one in (preprocessing, made) if one]
    versions = made.versions if made else {}
    return template.render(
        metadata=_metadata(facts),
        facts=facts,
        written=facts.written,
        is_adapter=facts.form == "adapter",
        architecture=next(iter(facts.written["architectures"]), "AutoModel"),
        base_options=dict(_base_options(facts.written)),
        recipe=record.get("recipe"),
        readers=list(_readers(record.get("recipe"))),
        prefix=str(settings.get("data.source_prefix") or ""),
        suffix=str(settings.get("data.source_suffix") or ""),
        own_metrics={
            key.removeprefix("val/"): value for key, value in (record.get("metrics") or {}).items()
        },
        step=record.get("step"),
        made=made,
        version=__version__,
        settings_by_stage=[(name, lines) for name, lines in stages if lines],
        versions=[f"{name} {versions[name]}" for name in _VERSIONS if name in versions],
        data=list(_data(facts.lineage)),
        dataset=next((one.id for one in facts.lineage.walk() if _is_dataset(one)), None),
    )


def _metadata(facts: CardFacts) -> str:
    from huggingface_hub import ModelCardData

    results = list(_results(facts))
    is_adapter = facts.form == "adapter"
    relation: dict[str, Any] = {"base_model_relation": "adapter" if is_adapter else "finetune"}
    card = ModelCardData(
        library_name="peft" if is_adapter else "transformers",
        base_model=facts.base.name if facts.base else None,
        datasets=_datasets(facts.lineage) or None,
        metrics=list(dict.fromkeys(result.metric_type for result in results)) or None,
        pipeline_tag=_task(facts),
        tags=["redco-flow"],
        model_name=facts.name if results else None,
        eval_results=results or None,
        **(relation if facts.base else {}),
    )
    return str(card.to_yaml())


def _results(facts: CardFacts) -> Iterator[Any]:
    """The scores of the last evaluation on the pipeline's data, and of the last one by lm-eval.

    The latter names no metrics of ours, and each score is of a task: `hellaswag/acc`.
    """
    from huggingface_hub import EvalResult

    last = {one.get("modules") == []: one for one in facts.evaluations}
    data = next(iter(_datasets(facts.lineage)), facts.name)
    for is_of_tasks, one in last.items():
        for key, value in (one.get("metrics") or {}).items():
            task, _, metric = key.rpartition("/") if is_of_tasks else ("", "", key)
            yield EvalResult(
                task_type=_task(facts) or "text2text-generation",
                dataset_type=task or data,
                dataset_name=task or f"{facts.name}, {one.get('split', '?')} split",
                metric_type=metric,
                metric_value=value,
            )


def _task(facts: CardFacts) -> str | None:
    classes = facts.written["architectures"]
    found = (task for end, task in _TASKS.items() for one in classes if one.endswith(end))
    return next(found, None)


def _datasets(lineage: LineageNode) -> list[str]:
    names = dict.fromkeys(leaf.name for leaf in lineage.leaves() if leaf.type == "data")
    return [name.removeprefix(_HUB_DATASETS) for name in names if name.startswith(_HUB_DATASETS)]


def _readers(recipe: str | None) -> Iterator[tuple[str, str]]:
    """The classes that read a model's inputs, and the variable of each."""
    if recipe != "image_classification":
        yield "AutoTokenizer", "tokenizer"
    if recipe in ("image_classification", "image_to_text"):
        yield "AutoImageProcessor", "images"


def _base_options(written: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The further arguments of `from_pretrained` of an adapter's base."""
    for key, value in (written.get("base_options") or {}).items():
        is_classes = key == "id2label"
        yield key, {int(at): name for at, name in value.items()} if is_classes else value


def _preprocessing(lineage: LineageNode) -> Production | None:
    made = (node.production for node in lineage.walk())
    return next((one for one in made if one is not None and one.kind == "preprocess"), None)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "–"


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


def _data(lineage: LineageNode) -> Iterator[tuple[str, str, str]]:
    """Name, kind of digest and digest of each raw data file."""
    for leaf in lineage.leaves():
        if leaf.type == "data":
            is_of_hub = leaf.name.startswith("hub:")
            name = leaf.name.partition("/")[2] if is_of_hub else Path(leaf.name).name
            yield name, "commit" if is_of_hub else "BLAKE3", leaf.id


def _is_dataset(node: LineageNode) -> bool:
    return node.type == "artifact" and node.name == "dataset"

"""Write a pipeline as YAML with a comment for each key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from redco_flow.spec.yaml import inline_yaml

_COLUMN = 50
_COMMENTS = {
    "name": "begins the ids of its runs",
    "recipe": "what is learnt; docs/guides/pipelines.md lists all recipes",
    "settings": "the recipe's own keys",
    "settings.max_length": "tokens of a prompt with an answer; longer rows are left out",
    "settings.image_size": "images are resized to this number of rows and columns",
    "settings.loss": "orpo needs no reference model",
    "model": "the model that is trained",
    "model.name_or_path": "a name on the Hugging Face hub, or a folder",
    "model.dtype": "the precision of the computation",
    "model.family": "the architecture; its parameters start from random values",
    "model.config": "the size of the model",
    "data": "the rows, and which columns are read",
    "data.dataset": "a file, or a folder of files or images",
    "data.csv": "how the file separates columns",
    "data.format": "how a row holds its conversation",
    "data.messages_key": "the column of the messages",
    "data.source_key": "the column of the input text",
    "data.pair_key": "the column of the second input text",
    "data.target_key": "the column to learn",
    "data.text_key": "the column of the text",
    "data.source_suffix": "added to each input text: here the prompt ends",
    "data.columns": "the recipe's name of a column: the file's name of it",
    "data.validation_fraction": "share of the rows that choose the best checkpoint",
    "data.test_fraction": "share of the rows that only `evaluate` scores",
    "data.on_bad_row": "leave out and count rows that cannot be used, or `error`",
    "data.tokenizer": "trained on the texts; a published model brings its own",
    "data.chat_template": "the text around messages",
    "stages": "run in this order; unchanged ones are reused",
    "preprocess": "turns texts or images into arrays",
    "preprocess.max_source_length": "tokens of an input text; more is cut off and counted",
    "preprocess.max_target_length": "tokens of a target, cut off there, or of pieces of plain text",
    "preprocess.max_length": "tokens of a conversation; more is cut off and counted",
    "reference": "scores each answer by the untrained model, with which DPO compares",
    "train": "writes checkpoints",
    "train.num_epochs": "passes over the training rows",
    "train.global_batch_size": "rows for each update, over all devices",
    "train.per_device_batch_size": "rows on a device at once; lower it if memory is short",
    "train.batching": "bucketed: rows of similar length; packed: several share a row",
    "train.learning_rate": "after the warmup; the first key to vary (--sweep)",
    "train.schedule": "how the learning rate changes over the training",
    "train.weight_decay": "pulls the parameters towards 0",
    "train.eval": "scores validation rows after each epoch",
    "train.keep": "the checkpoints that stay: the last one, and the best by a score",
    "train.lora": "trains small factors next to the model's parameters, which stay fixed",
    "train.frozen_dtype": "the precision of the parameters that stay fixed",
    "predict": "predicts for the test rows",
    "predict.checkpoint": "the best checkpoint by this score",
    "predict.prompt_length": "tokens of a text that are given; the rest is generated",
    "evaluate": "compares the predictions with the test rows",
    "evaluate.metrics": "listed in docs/guides/pipelines.md",
    "kind": "what the stage does",
    "dataset": "the stage whose rows it reads",
    "batch_size": "rows at once, over all devices",
    "reference_scores": "the stage that scored the answers before the training",
    "num_model_shards": "GPUs that share one copy of the model",
    "resources": "what the stage needs; with 0 GPUs it computes on CPUs, or what JAX finds",
}


def commented_yaml(values: Mapping[str, Any]) -> str:
    """Return a pipeline as YAML text, with the comment of each key from the table above."""
    return "".join(f"{line}\n" for line in _lines(values, ()))


def _lines(values: Mapping[str, Any], above: tuple[str, ...]) -> Iterator[str]:
    indent = "  " * len(above)
    for key, value in values.items():
        path = (*above, key)
        is_block = isinstance(value, Mapping) and value and (not above or above == ("stages",))
        line = f"{indent}{key}:{'' if is_block else f' {inline_yaml(value)}'}"
        comment = _COMMENTS.get(".".join(path).removeprefix("stages.")) or _COMMENTS[key]
        if not above and is_block:
            yield ""
        if len(line) < _COLUMN:
            yield f"{line:<{_COLUMN}}# {comment}"
        else:
            yield from (f"{indent}# {comment}", line)
        if is_block:
            yield from _lines(value, path)

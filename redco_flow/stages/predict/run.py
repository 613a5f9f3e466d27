"""Generate texts with a checkpoint: the heavy body of the predict stage."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from redco_flow.engine.deployer import Deployer
from redco_flow.engine.predictor import OutputFn, Predictor
from redco_flow.engine.sharding.rules import ShardingRules
from redco_flow.errors import RedcoFlowError
from redco_flow.recipes.chat.config import LEARNT
from redco_flow.recipes.find import find_recipe, shares_model
from redco_flow.recipes.recipe import (
    CLASSES,
    Batch,
    Generation,
    RandomChoice,
    Recipe,
    matmul_precision,
)
from redco_flow.runtime.context import Output, StageContext, StageOutputs
from redco_flow.runtime.process_group import describe_devices
from redco_flow.stages.artifacts.checkpoint import CheckpointArtifact, TrainedModel
from redco_flow.stages.artifacts.dataset import PART, DatasetArtifact
from redco_flow.stages.artifacts.predictions import (
    PredictionsSummary,
    plain_values,
    targets_of,
    write_predictions,
)
from redco_flow.stages.artifacts.pretrained import PretrainedModel
from redco_flow.stages.artifacts.reference_scores import reference_columns
from redco_flow.stages.artifacts.tokenizer import WrongTokenizer, check_model_tokenizer
from redco_flow.stages.common_stop import CommonStop
from redco_flow.stages.length_bucketing import bucket_prompts, bucket_rows
from redco_flow.stages.predict.config import GENERATION, Config
from redco_flow.stages.provenance import provenance_of
from redco_flow.text.pairs import PAIR_SEPARATOR
from redco_flow.text.special_tokens import cut_before
from redco_flow.text.tokenizer import TextTokenizer
from redco_flow.tracking.metrics_artifact import Prediction

logger = logging.getLogger(__name__)

_NO_TEST_SPLIT = (
    "the dataset has no test split, so validation rows are predicted: a checkpoint that was chosen "
    "by them scores too well on them; data.test_fraction holds other rows out, and `split: "
    "validation` says that these are meant."
)
# What the ids of a text's second and further windows end with.
_WINDOW = re.compile(r"#\d+$")


def begun(example: Mapping[str, Any], length: int, tokenizer: TextTokenizer) -> dict[str, Any]:
    """Return the example as a prompt of at most `length` tokens and what comes after it."""
    ids = example["target_ids"]
    # At least the last token is left to generate.
    cut = min(length, len(ids) - 1)
    prompt, rest = tokenizer.decode_batch([ids[:cut], ids[cut:]])
    return {
        **example,
        "source": prompt,
        "references": [rest],
        "source_ids": ids[:cut],
        "target_ids": ids[cut:],
    }


def count_bytes(examples: Sequence[Mapping[str, Any]], tokenizer: TextTokenizer) -> list[int]:
    """Return the bytes of the text that each example's target ids are, white space included.

    A window of a longer text has those that it adds to the window before it: the tokens of a
    character may be in both.
    """
    ids = [one["target_ids"] for one in examples]
    rows = [_WINDOW.sub("", one["row_id"]) for one in examples]
    before = [[], *(ids[at] if row == rows[at] else [] for at, row in enumerate(rows[1:]))]
    joined = [[*one, *own] for one, own in zip(before, ids, strict=True)]
    # Some tokenizers put a space before every text.
    (letter,) = tokenizer.decode_whole(tokenizer.encode_batch(["a"]))
    space = letter[: len(letter) - len(letter.lstrip())]
    sizes = (
        [len(text.removeprefix(space).encode()) for text in texts]
        for texts in map(tokenizer.decode_whole, (joined, before))
    )
    return [size - less for size, less in zip(*sizes, strict=True)]


class CannotPredict(RedcoFlowError):
    """The checkpoint, the dataset and the settings do not fit each other."""


def run(context: StageContext, config: Config) -> StageOutputs:
    """Write the predictions into the work directory.

    Raises:
        CannotPredict, WrongTokenizer: before anything is generated.
        CheckpointError: the checkpoint is damaged.
    """
    context.report(phase="preparing", devices=describe_devices())
    dataset = DatasetArtifact(context.input("dataset").path, reference_columns(context))
    checkpoint = _model(context, config, dataset)
    _check(dataset, checkpoint, config)
    _check_reference(context, checkpoint, config)
    split = config.split or ("test" if dataset.has("test") else "validation")
    is_fallback = config.split is None and split == "validation"
    if is_fallback and config.pretrained is None and context.attempt_dir.rank == 0:
        context.report(warning=_NO_TEST_SPLIT)
        logger.warning("%s", _NO_TEST_SPLIT)
    rows = dataset.split(split)
    examples = rows.__getitems__(range(min(len(rows), config.num_examples or len(rows))))
    predictor = _Prediction(context, config, dataset, checkpoint, split)
    lines = predictor.run(examples)
    provenance = provenance_of(context, config, data=context.input("dataset").id)
    summary = PredictionsSummary(
        split=split,
        num_examples=len(examples),
        generation=_generation(config) if find_recipe(config.recipe).makes_texts else {},
        checkpoint=_name(context, config),
        step=checkpoint.record.step,
        data=provenance.data,
        config=provenance.config,
        most_frequent_target=dataset.summary.most_frequent_target,
        mean_target=dataset.summary.mean_target,
        target=dataset.summary.target or None,
        classes=dataset.summary.classes,
        classes_are_ordered=dataset.summary.classes_are_ordered,
    )
    folder = context.work_dir / "predictions"
    if context.attempt_dir.rank == 0:  # every process has all texts, in input order
        shutil.rmtree(folder, ignore_errors=True)
        write_predictions(folder, lines, summary)
    return StageOutputs({"predictions": Output("predictions", folder, summary.to_json())})


def _model(context: StageContext, config: Config, dataset: DatasetArtifact) -> TrainedModel:
    """Return the checkpoint, or the published model."""
    section = config.pretrained
    if section is None:
        return CheckpointArtifact(context.input("checkpoint").path)
    texts = None
    if dataset.summary.has_tokenizer:
        check_model_tokenizer(section, dataset)
        texts = dataset.texts(*dataset.summary.lengths())
    return PretrainedModel.load(section.model_dump(), config.recipe, texts)


def _name(context: StageContext, config: Config) -> str:
    """Return the checkpoint's id, or the name of the published model, without its folder."""
    if config.pretrained is None:
        return context.input("checkpoint").id
    return Path(str(config.pretrained.name_or_path)).name


def _generation(config: Config) -> dict[str, Any]:
    said = set(GENERATION) - (set() if config.stop else {"stop"})
    return config.model_dump(mode="json", include=said)


def _check(dataset: DatasetArtifact, checkpoint: TrainedModel, config: Config) -> None:
    record = checkpoint.record
    is_readable = shares_model(config.recipe, record.recipe)
    if config.recipe != dataset.summary.recipe or not is_readable:
        raise CannotPredict(
            f"recipes differ: this stage has '{config.recipe}', the checkpoint "
            f"'{record.recipe}', the dataset '{dataset.summary.recipe}'; use one for all."
        )
    if record.tokenizer_digest != dataset.tokenizer_digest:
        raise WrongTokenizer(
            f"the checkpoint was trained with tokenizer {record.tokenizer_digest[:12]}, and the "
            f"dataset was encoded with {dataset.tokenizer_digest[:12]}: predict on a dataset that "
            "was preprocessed with the checkpoint's tokenizer."
        )
    known = record.model.get("settings", {}).get(CLASSES) or ()
    strange = [str(name) for name in dataset.summary.classes or () if name not in known]
    if strange:
        raise CannotPredict(
            f"the dataset has classes that the checkpoint was not trained for: "
            f"{', '.join(strange[:10])}; it knows {', '.join(map(str, known[:10]))}. Preprocess "
            "with the checkpoint's in settings.classes."
        )


def _check_reference(context: StageContext, checkpoint: TrainedModel, config: Config) -> None:
    record = checkpoint.record
    settings = record.model.get("settings", {}) if record.recipe == config.recipe else {}
    is_given = bool(context.inputs.get("reference_scores"))
    if find_recipe(config.recipe).compares(settings) and not is_given:
        raise CannotPredict(
            "the checkpoint's loss compares with a reference, without whose scores there are no "
            "rewards: give this stage the training's `reference_scores`."
        )


def _texts_by_row(recipe: Recipe, config: Config, token_ids: Any) -> list[list[str]]:
    """Decode ids (B, T), or (B, N, T) of several sequences, and cut texts at stop strings."""
    shape, num_sequences = np.shape(token_ids), config.num_return_sequences
    if num_sequences > 1:
        if len(shape) != 3 or shape[1] != num_sequences:
            raise CannotPredict(
                f"num_return_sequences is {num_sequences}, and the recipe's make_pred_fn gives ids "
                f"of shape {shape}: it does not know of several sequences."
            )
        token_ids = np.reshape(token_ids, (-1, shape[2]))
    texts = list(recipe.output_fn(token_ids))
    if config.stop:
        texts = [cut_before(text, config.stop).rstrip() for text in texts]
    return [texts[start : start + num_sequences] for start in range(0, len(texts), num_sequences)]


ClassProbabilities = dict[str, float]
PredFn = Callable[[Any, Batch, Any], Any]


def _with_probabilities(
    recipe: Recipe, pred_fn: PredFn, output_fn: OutputFn
) -> tuple[PredFn, OutputFn]:
    """Return a pred_fn and an output_fn that give pairs: output, probabilities of the classes."""
    scores_of = recipe.class_scores
    classes = [str(name) for name in recipe.model.get("settings", {}).get(CLASSES) or ()]
    if scores_of is None or not classes:
        raise CannotPredict(
            "the recipe says SCORES_CLASSES, and what its `build` returns has no `class_scores`, "
            "or its settings no classes: leave out `probabilities`, or give it both."
        )
    if len({*classes}) < len(classes):
        raise CannotPredict(
            f"classes have equal names ({', '.join(classes)}): leave out `probabilities`."
        )

    def with_scores(params: Any, batch: Batch, rngs: Any) -> dict[str, Any]:
        scores = scores_of(params, batch, rngs).astype(jnp.float32)
        return {
            "output": pred_fn(params, batch, rngs),
            "probabilities": jax.nn.softmax(scores, axis=-1),
        }

    def outputs(found: Mapping[str, Any]) -> list[tuple[Any, ClassProbabilities]]:
        of_rows = (
            {name: float(f"{one:.6g}") for name, one in zip(classes, row, strict=True)}
            for row in np.asarray(found["probabilities"])
        )
        return list(zip(output_fn(found["output"]), of_rows, strict=True))

    return with_scores, outputs


class _Prediction:
    """A checkpoint laid out over the devices, and what it is asked about one split."""

    def __init__(
        self,
        context: StageContext,
        config: Config,
        dataset: DatasetArtifact,
        checkpoint: TrainedModel,
        split: str,
    ) -> None:
        self._context = context
        self._config = config
        self._dataset = dataset
        self._checkpoint = checkpoint
        self._stop = CommonStop(context)
        self._deployer = Deployer(
            config.num_model_shards,
            num_fsdp_shards=config.fsdp,
            seed=config.seed,
            matmul_precision=matmul_precision(checkpoint.record.model),
        )
        self._source_length, self._target_length = dataset.summary.lengths((split,))
        if not dataset.summary.is_of_rows:
            # Training's width where it is enough, so that its evaluations are repeated to the last
            # bit.
            self._source_length = max(checkpoint.record.source_length, self._source_length)

    def run(self, examples: Sequence[dict[str, Any]]) -> list[Prediction]:
        """Return a line per example."""
        recipe = self._recipe()
        rules = self._rules(recipe, examples)
        params = self._checkpoint.load_params(recipe, self._deployer, rules)
        if self._dataset.summary.is_of_rows:
            return self._lines_of_rows(recipe, rules, params, examples)
        asked = examples
        target_length = self._dataset.summary.answer_length
        if self._dataset.summary.is_plain_text:
            length = self._config.prompt_length
            asked = [begun(example, length, self._dataset.tokenizer) for example in examples]
            target_length = self._rest_of_text(length)
            lengths = length, target_length
            recipe = self._checkpoint.build_recipe(*lengths, recipe=self._config.recipe)
        texts, probabilities = self._generate(recipe, rules, params, asked, target_length)
        summary = self._dataset.summary
        lines = [
            Prediction(
                example["row_id"],
                example["source"].replace(PAIR_SEPARATOR, "\n"),
                found[0],
                self._references(summary.references_of(example)),
                predictions=found if len(found) > 1 else None,
                probabilities=of_classes,
                part=example.get(PART),
            )
            for example, found, of_classes in zip(asked, texts, probabilities, strict=True)
        ]
        if not self._scores_targets():
            return lines
        scores = self._score(rules, params, examples)
        sizes = self._bytes_of(examples)
        return [
            replace(line, loss=float(loss), num_tokens=int(weight), num_bytes=size)
            for line, (loss, weight), size in zip(lines, scores, sizes, strict=True)
        ]

    def _lines_of_rows(
        self,
        recipe: Recipe,
        rules: ShardingRules,
        params: Any,
        examples: Sequence[dict[str, Any]],
    ) -> list[Prediction]:
        generation, output_fn, num_texts = Generation(0), recipe.output_fn, 1
        makes_texts = find_recipe(self._config.recipe).makes_texts
        if makes_texts:  # the recipe knows how long they are
            generation = self._generation(self._config.max_target_length or 0)
            num_texts = self._config.num_return_sequences
            output_fn = partial(_texts_by_row, recipe, self._config)
        given = (recipe, rules, params, examples, generation, output_fn)
        found, probabilities = self._predict(*given)
        targets = targets_of(examples, self._dataset.summary)
        parts = zip(examples, found, probabilities, targets.references, strict=True)
        return [
            Prediction(
                str(example["row_id"]),
                "",
                value[0] if makes_texts else value,
                self._references(references),
                predictions=list(value) if num_texts > 1 else None,
                probabilities=of_classes,
                row=plain_values(example),
            )
            for example, value, of_classes, references in parts
        ]

    def _references(self, found: Sequence[Any]) -> list[Any]:
        return [] if self._config.references is False else list(found)

    def _recipe(self) -> Recipe:
        lengths = self._source_length, self._target_length
        return self._checkpoint.build_recipe(*lengths, recipe=self._config.recipe)

    def _rest_of_text(self, prompt_length: int) -> int:
        if prompt_length < self._target_length:
            return self._target_length - prompt_length
        raise CannotPredict(
            f"prompt_length is {prompt_length}, and the dataset's texts have at most "
            f"{self._target_length} tokens: nothing would be left to generate."
        )

    def _rules(self, recipe: Recipe, examples: Sequence[dict[str, Any]]) -> ShardingRules:
        batch = recipe.collate_fn(examples[:1])
        shapes = recipe.abstract_params()
        return self._deployer.get_sharding_rules(shapes, recipe.loss_fn, batch, None, False)

    def _scores_targets(self) -> bool:
        asked = self._config.score_targets
        return find_recipe(self._config.recipe).measures_perplexity if asked is None else asked

    def _generate(
        self,
        recipe: Recipe,
        rules: ShardingRules,
        params: Any,
        examples: Sequence[dict[str, Any]],
        target_length: int,
    ) -> tuple[list[list[str]], Sequence[ClassProbabilities | None]]:
        """Return each example's texts, the first one first, and what `_predict` returns."""
        config = self._config
        max_length = config.max_target_length or target_length
        if config.min_new_tokens > max_length:
            raise CannotPredict(
                f"min_new_tokens is {config.min_new_tokens}, and at most {max_length} tokens are "
                "generated: raise max_target_length."
            )
        output_fn = partial(_texts_by_row, recipe, config)
        generation = self._generation(max_length)
        return self._predict(recipe, rules, params, examples, generation, output_fn)

    def _generation(self, max_length: int) -> Generation:
        config = self._config
        sampling = RandomChoice(config.temperature, config.top_k, config.top_p)
        return Generation(
            max_length=max_length,
            num_beams=config.num_beams,
            length_penalty=config.length_penalty,
            early_stopping=config.early_stopping,
            repetition_penalty=config.repetition_penalty,
            no_repeat_ngram_size=config.no_repeat_ngram_size,
            min_new_tokens=config.min_new_tokens,
            num_return_sequences=config.num_return_sequences,
            sampling=sampling if config.do_sample else None,
        )

    def _predict(
        self,
        recipe: Recipe,
        rules: ShardingRules,
        params: Any,
        examples: Sequence[dict[str, Any]],
        generation: Generation,
        output_fn: OutputFn,
    ) -> tuple[list[Any], Sequence[ClassProbabilities | None]]:
        """Return each example's output, and the probabilities of its classes or None."""
        pred_fn = recipe.make_pred_fn(generation)
        if self._config.probabilities:
            pred_fn, output_fn = _with_probabilities(recipe, pred_fn, output_fn)
        predictor = Predictor(
            self._deployer,
            collate_fn=recipe.collate_for_prediction,
            pred_fn=pred_fn,
            output_fn=output_fn,
            sharding_rules=rules,
            batch_size=self._config.batch_size,
        )
        found = predictor.predict(
            examples,
            params,
            bucketing=bucket_prompts(recipe, examples, self._config.batch_size),
            on_progress=self._reporter("predicting"),
        )
        if not self._config.probabilities:
            return found, [None] * len(found)
        return [one for one, _ in found], [of_classes for _, of_classes in found]

    def _score(
        self, rules: ShardingRules, params: Any, examples: Sequence[dict[str, Any]]
    ) -> list[tuple[Any, Any]]:
        """Return each first reference's summed loss, in nats, and its number of tokens."""
        recipe = self._recipe()
        predictor = Predictor(
            self._deployer,
            collate_fn=recipe.collate_fn,
            pred_fn=lambda params, batch, rngs: recipe.loss_fn(params, batch, rngs, False),
            sharding_rules=rules,
            batch_size=self._config.batch_size,
        )
        return predictor.predict(
            examples,
            params,
            bucketing=bucket_rows(recipe, examples, self._config.batch_size),
            on_progress=self._reporter("scoring targets"),
            verb="scored targets of",
        )

    def _bytes_of(self, examples: Sequence[dict[str, Any]]) -> Sequence[int | None]:
        """Return the bytes of the text whose loss `_score` sums; cut where the tokens were."""
        if examples and LEARNT in examples[0]:  # of a conversation only some tokens count
            return [None] * len(examples)
        return count_bytes(examples, self._dataset.tokenizer)

    def _reporter(self, phase: str) -> Callable[[int, int], None]:
        def on_progress(done: int, total: int) -> None:
            self._context.report(phase=phase, step=done, total_steps=total)
            self._stop.raise_if_requested()

        return on_progress

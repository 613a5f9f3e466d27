"""A checkpoint as lm-eval asks a model: log-likelihoods of continuations and texts, and new texts.

Dims in this file: N rows, T tokens of the longest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from numpy.typing import NDArray

from redco_flow.bounded import BoundedError
from redco_flow.engine.data.length_buckets import Bucketing
from redco_flow.engine.deployer import Deployer
from redco_flow.engine.predictor import Predictor
from redco_flow.errors import RedcoFlowError
from redco_flow.recipes.find import shares_model
from redco_flow.recipes.parts.model import end_ids
from redco_flow.recipes.recipe import (
    Generation,
    RandomChoice,
    Recipe,
    TokenLikelihoods,
    matmul_precision,
)
from redco_flow.stages.artifacts.checkpoint import CheckpointArtifact
from redco_flow.stages.artifacts.dataset import TOKENIZER_FOLDER
from redco_flow.stages.harness.config import Config
from redco_flow.stages.length_bucketing import bucket_lengths, bucket_prompts
from redco_flow.text.rendering import Chat, Wanted, render_chat
from redco_flow.text.special_tokens import cut_before, with_start
from redco_flow.text.tokenizer_files import load_pretrained

Progress = Callable[[str, int, int], None]
"""(what is done, rows done, rows in all)"""

_Pair = tuple[Any, Sequence[int], Sequence[int]]
_LANGUAGE = "language_modeling"
_WIDTH_MULTIPLE = 8
_KNOWN_ARGUMENTS = frozenset(
    {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p", "num_beams"}
)


class CannotAsk(RedcoFlowError):
    """The checkpoint's recipe cannot answer what a task asks."""


class HarnessModel(TemplateLM):
    """A checkpoint behind lm-eval's interface; every process of a job asks it everything.

    Args:
        checkpoint: of a decoder-only model.
        config: the stage's.
        on_progress: told after each batch.

    Raises:
        CannotAsk: the recipe has no likelihoods of tokens.
    """

    backend = "causal"

    def __init__(
        self, checkpoint: CheckpointArtifact, config: Config, on_progress: Progress
    ) -> None:
        super().__init__()
        self._checkpoint = checkpoint
        self._config = config
        self._on_progress = on_progress
        self._recipe = self._recipe_for(1, 1)
        self._likelihoods = _likelihoods_of(self._recipe, checkpoint)
        self._text = checkpoint.tokenizer
        self._deployer = Deployer(
            config.num_model_shards,
            num_fsdp_shards=config.fsdp,
            seed=config.seed,
            matmul_precision=matmul_precision(checkpoint.record.model),
        )
        example = {"row_id": "", "source_ids": [self._text.eos_id], "target_ids": [0]}
        self._rules = self._deployer.get_sharding_rules(
            self._recipe.abstract_params(),
            self._recipe.loss_fn,
            self._recipe.collate_fn([example]),
            None,
            False,
        )
        self._params = checkpoint.load_params(self._recipe, self._deployer, self._rules)

    def _recipe_for(self, source_length: int, target_length: int) -> Recipe:
        """Make the checkpoint's recipe; of a model that writes texts the one that reads them."""
        name = self._checkpoint.record.recipe
        if shares_model(name, _LANGUAGE):
            name = _LANGUAGE
        return self._checkpoint.build_recipe(source_length, target_length, recipe=name)

    @property
    def max_length(self) -> int:
        """Tokens that the model reads at once."""
        return self._config.max_length or self._likelihoods.max_length

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self._text.eos_id

    @property
    def prefix_token_id(self) -> int:
        """The token before a text with nothing before it."""
        return self._prefix[0] if self._prefix else self.eot_token_id

    @property
    def tokenizer_name(self) -> str:
        """Name of lm-eval's caches of requests."""
        return self._checkpoint.record.tokenizer_digest

    @property
    def _prefix(self) -> tuple[int, ...]:
        return self._text.prefix_ids

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Return a text's ids, the first special tokens before them unless it has them."""
        ids = self._text.encode_batch([string])[0]
        return with_start(ids, () if add_special_tokens is False else self._prefix)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Render a conversation by the template of the checkpoint's tokenizer."""
        wanted = Wanted(asks=add_generation_prompt, continues=not add_generation_prompt)
        try:
            ((text, _),) = render_chat(self._chat_tokenizer(), Chat(chat_history, None, [wanted]))
        except BoundedError as error:
            raise CannotAsk(f"the checkpoint's chat template fails: {error}") from error
        return text

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the template itself, for lm-eval's records."""
        return str(self._chat_tokenizer().chat_template) if chat_template else None

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihood of each whole text, in windows of `max_length` tokens."""
        owners: list[int] = []
        pairs: list[_Pair] = []
        for index, request in enumerate(requests):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for window in map(make_disjoint_window, windows):
                owners.append(index)
                pairs.append((None, *window))
        totals = [0.0] * len(requests)
        for index, (log_likelihood, _) in zip(owners, self._score(pairs), strict=True):
            totals[index] += log_likelihood
        return totals

    def _loglikelihood_tokens(
        self, requests: list[_Pair], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        return self._score(requests)

    def _score(self, pairs: Sequence[_Pair]) -> list[tuple[float, bool]]:
        """Return each continuation's log-likelihood, and whether it is the likeliest one."""
        if not pairs:
            return []
        examples = [self._cut(context, continuation) for _, context, continuation in pairs]
        num_ids = [len(one["context_ids"]) + len(one["continuation_ids"]) for one in examples]
        lengths = np.array(num_ids)[:, None] - 1
        width = -(-int(lengths.max()) // _WIDTH_MULTIPLE) * _WIDTH_MULTIPLE
        collate_to = self._likelihoods.collate_to
        predictor = Predictor(
            self._deployer,
            collate_fn=collate_to((width,)),
            pred_fn=self._likelihoods.score_fn,
            sharding_rules=self._rules,
            batch_size=self._config.batch_size,
        )
        bucketing = bucket_lengths(lengths, collate_to, self._config.batch_size)
        found = self._predict(predictor, examples, "scoring", bucketing)
        return [(float(one["log_likelihood"]), bool(one["is_greedy"])) for one in found]

    def _cut(self, context: Sequence[int], continuation: Sequence[int]) -> dict[str, Any]:
        """Keep the last tokens, as many as the model reads, and the one that it tells last."""
        ids = [*context, *continuation][-(self.max_length + 1) :]
        num_scored = min(len(continuation), len(ids) - 1)
        return {"context_ids": ids[:-num_scored], "continuation_ids": ids[-num_scored:]}

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return new texts, each cut before the first of its task's stop strings.

        Raises:
            CannotAsk: a task generates with an argument that is not known here.
        """
        texts = [""] * len(requests)
        groups: dict[str, list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            groups[repr(sorted(request.args[1].items()))].append(index)
        for rows in groups.values():
            arguments = dict(requests[rows[0]].args[1])
            found = self._generate([requests[row].args[0] for row in rows], arguments)
            for row, text in zip(rows, found, strict=True):
                texts[row] = text
        return texts

    def _generate(self, prompts: Sequence[str], arguments: Mapping[str, Any]) -> list[str]:
        if unknown := sorted(set(arguments) - _KNOWN_ARGUMENTS):
            known = ", ".join(sorted(_KNOWN_ARGUMENTS))
            raise CannotAsk(
                f"a task generates with {', '.join(unknown)}; known are {known}: change the "
                "task's generation_kwargs."
            )
        generation = self._generation(arguments)
        room = self.max_length - generation.max_length
        if room < 1:
            raise CannotAsk(
                f"a task generates {generation.max_length} tokens, and the model reads "
                f"{self.max_length} at once: lower max_gen_toks."
            )
        examples = [self._prompt(text, room) for text in prompts]
        longest = max(len(example["source_ids"]) for example in examples)
        recipe = self._recipe_for(longest, generation.max_length)
        predictor = Predictor(
            self._deployer,
            collate_fn=recipe.collate_for_prediction,
            pred_fn=recipe.make_pred_fn(generation),
            output_fn=self._decode,
            sharding_rules=self._rules,
            batch_size=self._config.batch_size,
            seed=self._config.seed,
        )
        bucketing = bucket_prompts(recipe, examples, self._config.batch_size)
        texts = self._predict(predictor, examples, "generating", bucketing)
        return [cut_before(text, _stop_strings(arguments)) for text in texts]

    def _prompt(self, text: str, room: int) -> dict[str, Any]:
        """Return an example of the last tokens of a prompt; the recipe puts the prefix before."""
        ids = self.tok_encode(text, add_special_tokens=False)
        prefix = self._text.prefix_ids
        if tuple(ids[: len(prefix)]) == prefix:
            ids = ids[len(prefix) :]
        kept = ids[-max(1, room - len(prefix)) :]
        return {"row_id": text[:40], "source_ids": kept, "target_ids": [self.eot_token_id]}

    def _decode(self, tokens: NDArray[np.int32]) -> list[str]:
        """Decode (B, T) up to each row's end, white space as it is."""
        ends, size = end_ids(self._checkpoint.record.model), self._text.vocab_size
        rows = [self._text.until_end(row, ends) for row in tokens.tolist()]
        known = [[token for token in row if token < size] for row in rows]
        return list(self._text.backend.decode_batch(known, skip_special_tokens=True))

    def _generation(self, arguments: Mapping[str, Any]) -> Generation:
        temperature = arguments.get("temperature")
        is_drawn = arguments.get("do_sample")
        if is_drawn is None:  # then a temperature says it, as in lm-eval
            is_drawn = bool(temperature)
        sampling = RandomChoice(
            float(temperature or 1.0),
            arguments.get("top_k"),
            float(arguments.get("top_p") or 1.0),
        )
        return Generation(
            max_length=int(arguments.get("max_gen_toks") or self._config.max_gen_toks),
            num_beams=int(arguments.get("num_beams") or 1),
            sampling=sampling if is_drawn and temperature != 0 else None,
        )

    def _predict(
        self,
        predictor: Predictor,
        examples: Sequence[Mapping[str, Any]],
        phase: str,
        bucketing: Bucketing | None,
    ) -> list[Any]:
        return predictor.predict(
            examples,
            self._params,
            bucketing=bucketing,
            on_progress=lambda done, total: self._on_progress(phase, done, total),
            verb=phase,
        )

    def _chat_tokenizer(self) -> Any:
        tokenizer = load_pretrained(self._checkpoint.path / TOKENIZER_FOLDER)
        if not tokenizer.chat_template:
            raise CannotAsk(
                "apply_chat_template is set, and the checkpoint's tokenizer has no chat template: "
                "leave it out, or train with a tokenizer that has one."
            )
        return tokenizer


def _stop_strings(arguments: Mapping[str, Any]) -> list[str]:
    until = arguments.get("until") or []
    return [until] if isinstance(until, str) else list(until)


def _likelihoods_of(recipe: Recipe, checkpoint: CheckpointArtifact) -> TokenLikelihoods:
    if recipe.token_likelihoods is None:
        raise CannotAsk(
            f"lm-eval needs log-likelihoods of tokens, which the recipe "
            f"'{checkpoint.record.recipe}' does not compute: evaluate a decoder-only model "
            "(recipe language_modeling), or use the stage kind evaluate."
        )
    return recipe.token_likelihoods

"""The tokenizer of a dataset that is being made: fetched or trained once, by one of the processes.

The others wait; if the one dies, its lock goes to the next. Equal training rows give
an equal tokenizer, whichever process trains it.
"""

from __future__ import annotations

import math
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from redco_flow.launch.work_lock import acquire
from redco_flow.recipes.find import find_recipe
from redco_flow.records import sync, write_json
from redco_flow.runtime.context import StageContext
from redco_flow.spec.pipeline import TokenizerTraining
from redco_flow.stages.artifacts.dataset import TOKENIZER_FOLDER
from redco_flow.stages.artifacts.tokenizer import (
    digest_of_tokenizer_files,
    save_pretrained_tokenizer,
    tokenizer_source,
)
from redco_flow.stages.preprocess.blocks import BlockStore
from redco_flow.stages.preprocess.config import Config
from redco_flow.text.chat import (
    CHATML_TOKENS,
    NAMED_TEMPLATES,
    TOKENIZER_DEFAULT,
    template_text,
)
from redco_flow.text.conversations import ROLES
from redco_flow.text.tokenizer import TextTokenizer

SPECIAL_TOKENS = ("<pad>", "</s>", "<unk>")
_MIN_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
_CANDIDATES_PER_TOKEN = 3
_KEPT_PER_ROUND = 0.75
_NUM_ROUNDS_AT_SIZE = 2

Scores = dict[str, float]


def train_tokenizer(
    texts: Iterable[str],
    vocab_size: int,
    kind: Literal["unigram", "bpe", "character"],
    needed: Iterable[str] = (),
) -> Any:
    """Return a trained `tokenizers.Tokenizer` with <pad> 0, </s> 1, <unk> 2.

    Args:
        texts: read once; memory grows with the number of distinct words only.
        vocab_size: an upper limit; a small corpus gives fewer tokens.
        needed: characters that one of type `character` has, however rare they are.

    Raises:
        ValueError: vocab_size leaves no room for the 256 bytes and the special tokens.
    """
    if vocab_size < _MIN_VOCAB_SIZE:
        raise ValueError(
            f"data.tokenizer.train.vocab_size is {vocab_size}; a byte-level tokenizer needs at "
            f"least {_MIN_VOCAB_SIZE}."
        )
    if kind == "character":
        return _character_tokenizer(texts, vocab_size, set(needed))
    if kind == "bpe":
        return _assembled(_train_bpe(texts, vocab_size).model)
    words: Counter[str] = Counter()
    candidates = _train_bpe(_counting(texts, words), _CANDIDATES_PER_TOKEN * vocab_size)
    return _assembled(_unigram_model(words, candidates, vocab_size))


def save_tokenizer(tokenizer: Any, directory: Path, **changes: Any) -> None:
    """Write a trained tokenizer as a directory that transformers' AutoTokenizer reads.

    Args:
        changes: of `tokenizer_config.json`.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": SPECIAL_TOKENS[0],
            "eos_token": SPECIAL_TOKENS[1],
            "unk_token": SPECIAL_TOKENS[2],
            # A text that holds "</s>" is text: it must not end the sequence.
            "split_special_tokens": True,
            "clean_up_tokenization_spaces": False,
            **changes,
        },
    )


def save_chat_tokenizer(tokenizer: Any, directory: Path) -> None:
    """Write a trained tokenizer with ChatML's two tokens, of which one ends every turn."""
    from tokenizers import AddedToken, pre_tokenizers

    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in CHATML_TOKENS]
    )
    if isinstance(tokenizer.pre_tokenizer, pre_tokenizers.ByteLevel):
        # A special token begins a new piece of text, before which there is no space.
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    # The template writes its special tokens as text, from which they are to be read.
    changes = {"eos_token": CHATML_TOKENS[1], "split_special_tokens": False}
    save_tokenizer(tokenizer, directory, **changes, chat_template=NAMED_TEMPLATES["chatml"])


def _byte_level() -> Any:
    from tokenizers import pre_tokenizers

    return pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=True)


def _train_bpe(texts: Iterable[str], vocab_size: int) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = _byte_level()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(iter(texts), trainer)
    return tokenizer


def _character_tokenizer(texts: Iterable[str], vocab_size: int, needed: set[str]) -> Any:
    """Take those that are needed and the most frequent, in the order of their code points."""
    from tokenizers import Regex, decoders, models, pre_tokenizers

    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    others = counts.keys() - needed
    ranked = sorted(others, key=lambda character: (-counts[character], character))
    kept = sorted([*needed, *ranked][: vocab_size - len(SPECIAL_TOKENS)])
    vocab = {token: number for number, token in enumerate((*SPECIAL_TOKENS, *kept))}
    return _assembled(
        models.WordLevel(vocab, unk_token=SPECIAL_TOKENS[2]),
        pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated"),
        decoders.Fuse(),
    )


def _assembled(model: Any, pre_tokenizer: Any = None, decoder: Any = None) -> Any:
    """Make a tokenizer of a model, byte-level by default."""
    from tokenizers import AddedToken, Tokenizer, decoders, processors

    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer or _byte_level()
    tokenizer.decoder = decoder or decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    eos = SPECIAL_TOKENS[1]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {eos}", pair=f"$A {eos} $B {eos}", special_tokens=[(eos, 1)]
    )
    return tokenizer


def _counting(texts: Iterable[str], words: Counter[str]) -> Iterator[str]:
    """Pass texts on while counting their words, as BPE will see them."""
    split = _byte_level().pre_tokenize_str
    for text in texts:
        words.update(word for word, _ in split(text))
        yield text


def _unigram_model(words: Counter[str], candidates: Any, vocab_size: int) -> Any:
    """Prune the candidates round by round to those that explain the words best."""
    from tokenizers import pre_tokenizers

    alphabet = frozenset(pre_tokenizers.ByteLevel.alphabet())
    tokens = set(candidates.get_vocab()) - set(SPECIAL_TOKENS)
    scores: Scores = dict.fromkeys(sorted(tokens), -math.log(len(tokens)))
    distinct = sorted(words)
    target = vocab_size - len(SPECIAL_TOKENS)
    rounds_left = _NUM_ROUNDS_AT_SIZE
    while rounds_left:
        counts = _segment_counts(scores, distinct, words)
        scores = _log_shares(scores, counts)
        if len(scores) > target:
            size = max(target, int(len(scores) * _KEPT_PER_ROUND))
            scores = _pruned(scores, counts, alphabet, size)
        else:
            rounds_left -= 1
    return _model(scores)


def _model(scores: Scores) -> Any:
    from tokenizers import models

    specials = [(token, 0.0) for token in SPECIAL_TOKENS]
    ranked = sorted(scores.items(), key=lambda item: (-item[1], item[0]))
    return models.Unigram([*specials, *ranked], unk_id=SPECIAL_TOKENS.index("<unk>"))


def _segment_counts(scores: Scores, distinct: list[str], words: Counter[str]) -> Counter[str]:
    """Count how often each token occurs in the best segmentation of all words."""
    from tokenizers import Tokenizer

    counts: Counter[str] = Counter()
    encodings = Tokenizer(_model(scores)).encode_batch(distinct, add_special_tokens=False)
    for word, encoding in zip(distinct, encodings, strict=True):
        for token in encoding.tokens:
            counts[token] += words[word]
    return counts


def _log_shares(scores: Scores, counts: Counter[str]) -> Scores:
    total = counts.total() + 0.5 * len(scores)
    return {token: math.log((counts[token] + 0.5) / total) for token in scores}


def _pruned(scores: Scores, counts: Counter[str], alphabet: frozenset[str], size: int) -> Scores:
    """Keep the alphabet and the tokens whose loss would cost the most likelihood."""

    def score(piece: str) -> float:
        return scores[piece] if piece in scores else sum(scores[byte] for byte in piece)

    def cost(token: str) -> float:
        best = max(score(token[:i]) + score(token[i:]) for i in range(1, len(token)))
        return counts[token] * (scores[token] - best)

    removable = sorted((cost(token), token) for token in scores if token not in alphabet)
    kept = set(alphabet) | {token for _, token in removable[len(scores) - size :]}
    return {token: score for token, score in scores.items() if token in kept}


@contextmanager
def _alone(context: StageContext) -> Iterator[None]:
    """Hold the lock of the stage's tokenizer.

    Raises:
        Stopped: a stop was requested while another process had it.
    """

    def while_waiting(holder: str) -> None:
        context.report(phase=f"waiting for the tokenizer of {holder}")
        context.raise_if_stopped()

    lock = acquire(context.work_dir / "tokenizer.lock", context.holder(), while_waiting)
    try:
        yield
    finally:
        lock.release()


def ensure_tokenizer(
    context: StageContext, config: Config, store: BlockStore, texts: Iterable[str]
) -> Path:
    """Return the directory of the dataset's tokenizer, which is made if it is not there.

    Args:
        texts: of the training rows; read where the tokenizer is to be trained.

    Raises:
        BadRows, NoRows, DataChanged: a tokenizer is to be trained on data that cannot be used.
        ValueError: the tokenizer cannot be had or trained.
        Stopped: a stop was requested.
    """
    directory = store.dataset / TOKENIZER_FOLDER
    with _alone(context):
        if directory.exists():
            return directory
        context.report(phase="tokenizer")
        unfinished = store.new_file()
        if not _take_or_fetch(context, config, unfinished):
            _save_trained(config, texts, unfinished)
        _put_in_place(unfinished, directory)
    return directory


def _take_or_fetch(context: StageContext, config: Config, directory: Path) -> bool:
    """Save the tokenizer that is taken from an input or named, and say whether one is."""
    if not context.inputs.get("tokenizer_of"):
        return fetch_tokenizer(config, directory)
    own = context.input("tokenizer_of").path / TOKENIZER_FOLDER
    if not own.is_dir():
        raise ValueError(f"tokenizer_of: there is no tokenizer in {own.parent}.")
    if (name := config.data.chat_template) is None or name == TOKENIZER_DEFAULT:
        shutil.copytree(own, directory)
    else:
        save_pretrained_tokenizer(str(own), directory, chat_template=template_text(name))
    return True


def fetch_tokenizer(config: Config, directory: Path) -> bool:
    """Save the tokenizer that is named, and say whether one is."""
    source = tokenizer_source(config.model, config.data)
    if source is None:
        return False
    of = config.data.tokenizer or config.model
    template = template_text(config.data.chat_template or TOKENIZER_DEFAULT)
    save_pretrained_tokenizer(source, directory, revision=of.revision, chat_template=template)
    return True


def _asked_training(config: Config) -> TokenizerTraining:
    asked = config.data.tokenizer.train if config.data.tokenizer else None
    assert asked is not None  # Config sees to it
    return asked


def _save_trained(config: Config, texts: Iterable[str], directory: Path) -> None:
    """Train a tokenizer; with ChatML's template where the rows are conversations, or may be."""
    asked = _asked_training(config)
    if not find_recipe(config.recipe).takes_conversations and config.data.chat_template is None:
        save_tokenizer(train_tokenizer(texts, asked.vocab_size, asked.type), directory)
        return
    size = asked.vocab_size - len(CHATML_TOKENS)
    of_roles = "\n".join((*ROLES, ""))  # no message need have these letters
    save_chat_tokenizer(train_tokenizer(texts, size, asked.type, of_roles), directory)


def record_of(tokenizer: TextTokenizer, context: StageContext, config: Config) -> dict[str, Any]:
    """Return a tokenizer's fields of a `DatasetSummary`."""
    record = {
        "digest": tokenizer.digest,
        "vocab_size": tokenizer.vocab_size,
        "pad_id": tokenizer.pad_id,
        "eos_id": tokenizer.eos_id,
    }
    source = tokenizer_source(config.model, config.data)
    if source is None or context.inputs.get("tokenizer_of"):
        return record
    revision = (config.data.tokenizer or config.model).revision
    return record | {"files": digest_of_tokenizer_files(source, revision)}


def _put_in_place(unfinished: Path, directory: Path) -> None:
    for path in (*unfinished.iterdir(), unfinished):
        sync(path)
    unfinished.rename(directory)
    sync(directory.parent)

"""Train a byte-level tokenizer on texts: the same texts, the same tokenizer, byte for byte.

BPE is `tokenizers`' own trainer. Its unigram trainer sums in the order of a randomly seeded
hash map, so two runs differ; here a unigram model is grown from BPE's candidates by hard EM with
`tokenizers` segmenting the words. Both keep every text exactly: no token is unknown.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from redco_flow.records import write_json

SPECIAL_TOKENS = ("<pad>", "</s>", "<unk>")
_MIN_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
_CANDIDATES_PER_TOKEN = 3
_KEPT_PER_ROUND = 0.75
_NUM_ROUNDS_AT_SIZE = 2

Scores = dict[str, float]


def train_tokenizer(texts: Iterable[str], vocab_size: int, kind: Literal["unigram", "bpe"]) -> Any:
    """Return a trained `tokenizers.Tokenizer` with <pad> 0, </s> 1, <unk> 2.

    Args:
        texts: read once; memory grows with the number of distinct words only.
        vocab_size: an upper limit; a small corpus gives fewer tokens.

    Raises:
        ValueError: vocab_size leaves no room for the 256 bytes and the special tokens.
    """
    if vocab_size < _MIN_VOCAB_SIZE:
        raise ValueError(
            f"data.tokenizer.train.vocab_size is {vocab_size}; a byte-level tokenizer needs at "
            f"least {_MIN_VOCAB_SIZE}."
        )
    if kind == "bpe":
        return _assembled(_train_bpe(texts, vocab_size).model)
    words: Counter[str] = Counter()
    candidates = _train_bpe(_counting(texts, words), _CANDIDATES_PER_TOKEN * vocab_size)
    return _assembled(_unigram_model(words, candidates, vocab_size))


def save_tokenizer(tokenizer: Any, directory: Path) -> None:
    """Write a trained tokenizer as a directory that transformers' AutoTokenizer reads."""
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
        },
    )


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


def _assembled(model: Any) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, processors

    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = _byte_level()
    tokenizer.decoder = decoders.ByteLevel()
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
    """How often each token occurs in the best segmentation of all words."""
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

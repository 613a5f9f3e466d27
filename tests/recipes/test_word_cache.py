"""Texts encoded word by word have the ids that the tokenizer itself gives the whole texts."""

import base64
import json
import zlib
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)

from redco_flow.recipes.text_tokenizer import TextTokenizer
from redco_flow.recipes.word_cache import WordCache
from redco_flow.recipes.word_cuts import find_cuts

CORPUS = [
    "The Eagle is a low-priced coffee shop near Burger King; it's not family-friendly.",
    "Don't they've won 1234 of 10,000 games? I'll say: \"no\", they wouldn't!",
    "def add(a, b):\n    return a + b\n\n# naïve café façade Größe",
    "Привет, мир! как дела 世界 こんにちは e\u0301galite\u0301",
] * 4

GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
QWEN2_PATTERN, LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    + numbers
    + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for numbers in (r"\p{N}", r"\p{N}{1,3}")
)
T5 = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(prepend_scheme="always")]
# As SentencePiece compiles one: "A" and a wide one to "a", a ligature to "fi", two white spaces to
# " ", and U+0001 and a middle dot to nothing.
CHARACTER_MAP = zlib.decompress(
    base64.b64decode(
        "eJwt02XsF0QYB/D7ES/YCIExGklp6a6BCEqXIN3doSAd0kh3hzRKdzO6uxuDcnQj8Plv3PbZ93lxt7vndhdihBBi"
        "h6jRPxInhLkpQ4ioo7MiRAsDioUQUz0vVwixCmFiXOJ9XmZJSEBCviA+G38IIbHc9jpaSCSTkZwkJCUVX5IC24W0"
        "pCM1afiKjKQnA1nISiYy8zU5yEZ2cpOHnDhmyE8B8pKPwhShIFoIxSlBUbQXSvENJVNGQklZhrKU5lvKUZ7v+J5K"
        "VKYCFalGdapQlZrUogauItShLj9SmwY0pB71aUJTGtGYFrSkGc1pQ1ta0ZoOdKQd7elCVzrRmZ/pTjd+oie96MEv"
        "9KUfvenDQAZFPQAGMISh/MpgRjCSYQxnNGMYxW+MZwJjGcdkpjCRSUxnBlOZxmzmMJNZzGcBc5nHIhbzOwtZxnKW"
        "sJQ/WckK/mANa1nFajawkXWsZwtb2cRmdrCTbWxnT5RhkbBL7mY/B9jLPg5zhIMc4jgnOMoxTnOGk5ziPBc4yzku"
        "c4WLXOI6N7jKNW5zh5vc4h/+5S/+5j4PuMs9HiWJhEfyIf/xlGc85gkvecVzXvCWd7zmDR/4yHv+x8drHFq0Dp8A"
        "oluJVQ=="
    )
)
TO_SIGN = normalizers.Replace(" ", "▁")


def split_and_bytes(pattern):
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def bpe(normalizer, pre_tokenizer, **options):
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", **options))
    tokenizer.pre_tokenizer = pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<unk>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return with_normalizer(tokenizer, normalizer)


def sentence_piece_bpe(normalizer, pre_tokenizer):
    """It sees whole texts, and was trained on words, and on runs of spaces."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    content = json.loads(tokenizer.to_str())
    content["model"]["vocab"]["▁▁"] = len(content["model"]["vocab"])
    content["model"]["merges"].insert(0, ["▁", "▁"])
    tokenizer = Tokenizer.from_str(json.dumps(content))
    tokenizer.pre_tokenizer = pre_tokenizer
    return with_normalizer(tokenizer, normalizer)


def unigram(normalizer, pre_tokenizer):
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizer
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return with_normalizer(tokenizer, normalizer)


def word_piece(normalizer, pre_tokenizer):
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizer
    trainer = trainers.WordPieceTrainer(
        vocab_size=400, special_tokens=["<unk>"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return with_normalizer(tokenizer, normalizer)


def with_normalizer(tokenizer, normalizer):
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return tokenizer


MAKERS = {
    "GPT-2, GPT-J, OPT, BART, RoBERTa": lambda: bpe(None, GPT2),
    "byte-level with a space before the text": lambda: bpe(
        None, pre_tokenizers.ByteLevel(add_prefix_space=True)
    ),
    "LLaMA 3": lambda: bpe(None, split_and_bytes(LLAMA3_PATTERN), ignore_merges=True),
    "Qwen 2": lambda: bpe(normalizers.NFC(), split_and_bytes(QWEN2_PATTERN)),
    "T5": lambda: unigram(normalizers.Precompiled(CHARACTER_MAP), pre_tokenizers.Sequence(T5)),
    "T5, converted anew": lambda: unigram(
        normalizers.Sequence(
            [
                normalizers.Precompiled(CHARACTER_MAP),
                normalizers.Strip(left=False, right=True),
                normalizers.Replace(Regex(" {2,}"), "▁"),
            ]
        ),
        pre_tokenizers.Metaspace(prepend_scheme="always"),
    ),
    "runs of spaces made one": lambda: unigram(
        normalizers.Sequence(
            [
                normalizers.Precompiled(CHARACTER_MAP),
                normalizers.Replace(Regex(" {2,}"), " "),
            ]
        ),
        pre_tokenizers.Metaspace(prepend_scheme="always"),
    ),
    "a space sign before the first word alone": lambda: unigram(
        normalizers.Replace("``", '"'), pre_tokenizers.Metaspace(prepend_scheme="first")
    ),
    "characters by their compatibility": lambda: unigram(
        normalizers.NFKC(), pre_tokenizers.WhitespaceSplit()
    ),
    "a space sign before no word": lambda: unigram(
        normalizers.Nmt(), pre_tokenizers.Metaspace(prepend_scheme="never")
    ),
    "BERT": lambda: word_piece(
        normalizers.BertNormalizer(lowercase=True), pre_tokenizers.BertPreTokenizer()
    ),
    "accents taken off, digits apart": lambda: word_piece(
        normalizers.Sequence(
            [normalizers.NFD(), normalizers.Lowercase(), normalizers.StripAccents()]
        ),
        pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Digits(True)]),
    ),
    "LLaMA 2, as first converted": lambda: sentence_piece_bpe(
        normalizers.Sequence([normalizers.Prepend("▁"), TO_SIGN]), None
    ),
    "LLaMA 2, Mistral": lambda: sentence_piece_bpe(
        None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    ),
    "Gemma": lambda: sentence_piece_bpe(TO_SIGN, pre_tokenizers.Split(" ", "merged_with_previous")),
}

TEXTS = [
    "",
    " ",
    "  ",
    "a",
    " a",
    "a ",
    "one two three two one",
    "one  two   three",
    " leading and trailing ",
    "tab\tand\nnew line \n at \r\n ends",
    "no\u00a0break \u2003 em space",
    "it's I'll 'S 's  's",
    "a \x01 b \x1f c \x7f",
    "▁ ▁a a▁ b ▁▁",
    "`` quoted '' ``",
    "\ufb01ne \uff21 A \x01 Ab \u00b7 a\u00b7 b",
    "x \u0301y \u00a8 \ufdfa \u037a z",
    "Привет мир, 世界 こんにちは 世界",
    "\u0600 number \u200b zero \ufeff width",
    "😀 👩‍👩‍👧 e\u0301 e\u0301",
    "one \u00b7 two",
    "<unk> un<unk>k",
]

# What makes tokenizers differ is drawn often: white space, signs, marks, cases.
HARD_TEXTS = st.text(
    st.one_of(
        st.sampled_from(
            " " * 6 + "\t\n\r\u00a0\u2003\u0085\x1f▁'`.,-aAbBsStT019éß·世\u0301\u0600😀"
        ),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=40,
)


@pytest.fixture(scope="module", params=MAKERS)
def tokenizer(request):
    return as_tokenizer(MAKERS[request.param]())


def as_tokenizer(backend):
    """One that is known to encode word by word."""
    tokenizer = TextTokenizer(backend, pad_id=0, eos_id=0)
    assert tokenizer._words is not None
    return tokenizer


def whole(tokenizer, texts):
    encodings = tokenizer.backend.encode_batch(texts, add_special_tokens=False)
    return [encoding.ids for encoding in encodings]


def test_texts_have_the_ids_of_the_whole(tokenizer):
    texts = TEXTS + CORPUS

    assert tokenizer.encode_batch(texts) == whole(tokenizer, texts)
    assert tokenizer.encode_batch(texts) == whole(tokenizer, texts)  # now by heart


@settings(max_examples=300, deadline=None)
@given(texts=st.lists(HARD_TEXTS, max_size=4))
def test_any_text_has_the_ids_of_the_whole(tokenizer, texts):
    assert tokenizer.encode_batch(texts) == whole(tokenizer, texts)


ADDED = [
    AddedToken("<mask>", lstrip=True, special=True),
    AddedToken("<end>", rstrip=True),
    AddedToken("kilo", single_word=True),
    AddedToken("BaR", normalized=True),
    AddedToken(" indent", normalized=False),
]
PARTS = ["<mask>", "<end>", "kilo", "kilos", "BaR", "bar", " indent", " ", "  ", "\n", "a", "b."]


@pytest.fixture(scope="module", params=["GPT-2, GPT-J, OPT, BART, RoBERTa", "T5", "BERT"])
def with_added_tokens(request):
    backend = MAKERS[request.param]()
    backend.add_tokens(ADDED)
    return as_tokenizer(backend)


@settings(max_examples=300, deadline=None)
@given(texts=st.lists(st.lists(st.sampled_from(PARTS), max_size=12).map("".join), max_size=4))
def test_added_tokens_are_found_as_in_the_whole(with_added_tokens, texts):
    tokenizer = with_added_tokens

    assert tokenizer.encode_batch(texts) == whole(tokenizer, texts)


def test_special_tokens_that_are_text_do_not_stand_in_the_way():
    backend = MAKERS["T5"]()
    backend.add_special_tokens([AddedToken("New York", special=True)])
    assert TextTokenizer(backend, 0, 0)._words is None

    backend.encode_special_tokens = True

    tokenizer = as_tokenizer(backend)
    texts = ["to New York and <unk> back"]
    assert tokenizer.encode_batch(texts) == whole(tokenizer, texts)


def with_token(backend, *tokens):
    backend.add_tokens(list(tokens))
    return backend


def joining_words():
    """Byte pairs of whole texts, some of which reach from one word to the next."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<unk>"], show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def with_dropout():
    backend = bpe(None, GPT2)
    backend.model.dropout = 0.5
    return backend


NOT_CUT = {
    "an added token of two words": lambda: with_token(MAKERS["T5"](), "New York"),
    "an added token that is normalized otherwise": lambda: with_token(
        MAKERS["BERT"](), AddedToken("\u00a8x", normalized=True)
    ),
    "an added token, normalized, of a tokenizer without pre-tokens": lambda: with_token(
        MAKERS["Gemma"](), AddedToken("foo", normalized=True)
    ),
    "merges across words": joining_words,
    "merges by chance": with_dropout,
    "a word list over whole texts": lambda: sentence_piece_bpe(None, None),
    "white space taken off before a text": lambda: bpe(normalizers.Strip(), GPT2),
    "an unknown replacement": lambda: bpe(normalizers.Replace(Regex("a b"), "c"), GPT2),
    "two words replaced": lambda: bpe(normalizers.Replace("a b", "c"), GPT2),
    "an unknown pattern": lambda: bpe(None, split_and_bytes(r"\w+ \w+")),
    "bytes that are not split": lambda: bpe(
        None, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ),
    "pre-tokens by script": lambda: bpe(
        None, pre_tokenizers.Sequence([GPT2, pre_tokenizers.UnicodeScripts()])
    ),
    "scores over whole texts": lambda: with_pre_tokenizer(
        MAKERS["T5"](), pre_tokenizers.Metaspace(split=False)
    ),
}


def with_pre_tokenizer(backend, pre_tokenizer):
    backend.pre_tokenizer = pre_tokenizer
    return backend


@pytest.mark.parametrize("name", NOT_CUT)
def test_a_tokenizer_that_may_look_across_words_encodes_whole_texts(name):
    backend = NOT_CUT[name]()

    assert TextTokenizer(backend, 0, 0)._words is None


def test_a_joining_tokenizer_does_join():
    """What is not cut is not cut for a reason."""
    backend = joining_words()
    text = "a + b"

    apart = [backend.encode(part).ids for part in ("a", " +", " b")]

    assert list(chain.from_iterable(apart)) != backend.encode(text).ids


class Counting:
    """A tokenizer's backend that counts what it encodes."""

    def __init__(self, backend):
        self.backend, self.num_texts = backend, 0

    def encode_batch_fast(self, texts, **options):
        self.num_texts += len(texts)
        return self.backend.encode_batch_fast(texts, **options)


@pytest.fixture
def counting():
    return Counting(MAKERS["GPT-2, GPT-J, OPT, BART, RoBERTa"]())


def cache_of(counting, **options):
    content = json.loads(counting.backend.to_str())
    return WordCache(counting, find_cuts(content, splits_special_tokens=False), **options)


def test_each_word_is_encoded_once_and_once_more_as_a_first_word(counting):
    cache = cache_of(counting)

    for _ in range(3):
        list(cache.encode(["one two two one", "two two"]))

    assert counting.num_texts == 4  # "one" and "two", at the beginning and elsewhere


def test_words_beyond_the_limit_are_forgotten_and_encoded_again(counting):
    cache = cache_of(counting, max_bytes=1000)
    texts = [f"a{i} b{i} c{i}" for i in range(40)]

    rows = [ids.tolist() for text in texts * 2 for ids in cache.encode([text])]

    assert counting.num_texts == 2 * 3 * 40
    expected = [e.ids for e in counting.backend.encode_batch(texts, add_special_tokens=False)]
    assert rows == expected * 2


def test_threads_encode_at_the_same_time_while_words_are_forgotten():
    backend = MAKERS["BERT"]()
    cache = cache_of(Counting(backend), max_bytes=2000)
    texts = [f"word{i % 7} has{i % 11} number{i}" for i in range(400)]
    batches = [texts[start : start + 10] for start in range(0, 400, 10)]

    with ThreadPoolExecutor(4) as pool:
        rows = list(pool.map(lambda batch: list(cache.encode(batch)), batches * 5))

    expected = [e.ids for e in backend.encode_batch(texts, add_special_tokens=False)]
    assert [ids.tolist() for batch in rows for ids in batch] == expected * 5

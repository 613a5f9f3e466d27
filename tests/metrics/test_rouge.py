"""ROUGE and its stemmer, against `rouge_score`, NLTK and figures that they gave."""

import itertools
import re

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from nltk.stem.porter import PorterStemmer
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu.tokenizers.tokenizer_13a import Tokenizer13a

from redco_flow.corpora import python_reference
from redco_flow.metrics import rouge
from redco_flow.metrics.porter_stemmer import stem
from redco_flow.metrics.rouge import Settings

SUFFIXES = (
    "ational tional enci anci izer bli alli entli eli ousli ization ation ator alism iveness "
    "fulness ousness aliti iviti biliti fulli logi icate ative alize iciti ical ful ness al ance "
    "ence er ic able ible ant ement ment ent sion tion ion ou ism ate iti ous ive ize e ll y s ies "
    "sses ss ed ing eed ied"
)
words = st.builds(
    "".join,
    st.tuples(
        st.text("abeilosty1", max_size=6),
        st.lists(st.sampled_from(SUFFIXES.split()), max_size=3).map("".join),
    ),
).filter(lambda word: len(word) > 2)
# Few words, so that texts share some; lines, because ROUGE-Lsum compares them one by one.
texts = st.lists(
    st.sampled_from(["a", "b", "c", "running", "Runs", "skies", "\n", "\n", "é", "x1", "."]),
    max_size=25,
).map(" ".join)


def scores_of_rouge_score(prediction, references, **options):
    scores = RougeScorer(list(rouge.KEYS), **options).score_multi(references, prediction)
    return {key: [100.0 * float(score.fmeasure)] for key, score in scores.items()}


@settings(max_examples=300)
@given(texts, st.lists(texts, min_size=1, max_size=3), st.booleans())
def test_scores_equal_those_of_rouge_score_to_the_last_bit(prediction, references, use_stemmer):
    found = rouge.per_example([prediction], [references], settings=Settings("latin", use_stemmer))

    assert found == scores_of_rouge_score(prediction, references, use_stemmer=use_stemmer)


def test_scores_of_english_paragraphs_equal_those_of_rouge_score():
    documents = [row["text"] for row in python_reference.rows(python_reference.files())]
    beginnings = [document[:600] for document in documents[:60]]

    for prediction, reference in itertools.pairwise(beginnings):
        found = rouge.per_example([prediction], [[reference]])
        assert found == scores_of_rouge_score(prediction, [reference], use_stemmer=True)


@pytest.mark.parametrize(
    ("prediction", "reference", "use_stemmer", "expected"),
    [
        ("the cat sat on the mat the cat", "the cat the dog the mat", True,
         [71.428571, 33.333333, 57.142857, 57.142857]),
        ("a b c d\nc d e f", "c d a b\nf e d c", False, [100.0, 42.857143, 50.0, 50.0]),
        ("The relational databases were happily conditioned.\nNobody proceeded.",
         "Nobody proceeds.\nA database relates happy conditions.", True,
         [53.333333, 0.0, 26.666667, 40.0]),
        ("Skies are generalizing; flies tried.", "The sky generalized, a fly is trying!", True,
         [50.0, 0.0, 50.0, 50.0]),
        ("x", "", True, [0.0, 0.0, 0.0, 0.0]),
    ],
)  # fmt: skip
def test_scores_are_those_that_rouge_score_0_1_2_gave(prediction, reference, use_stemmer, expected):
    found = rouge.compute([prediction], [[reference]], settings=Settings("latin", use_stemmer))

    assert list(found.values()) == pytest.approx(expected, abs=1e-6)


def test_tokens_of_sacrebleu_are_lower_case_and_stemmed_before_they_are_compared():
    class Tokenizer:
        def tokenize(self, text):
            tokens = Tokenizer13a()(text.lower()).split()
            return [PorterStemmer().stem(token) if len(token) > 3 else token for token in tokens]

    prediction, reference = "Dogs, running; cafés closed.", "A dog runs, the CAFÉS closing."

    found = rouge.per_example([prediction], [[reference]], settings=Settings("13a"))

    assert found == scores_of_rouge_score(prediction, [reference], tokenizer=Tokenizer())


@settings(max_examples=500)
@given(words)
def test_stems_of_random_words_equal_those_of_nltk(word):
    assert stem(word) == PorterStemmer().stem(word)


def test_stems_of_english_words_equal_those_of_nltk():
    text = " ".join(row["text"] for row in python_reference.rows(python_reference.files()))
    irregular = (
        "sky skies dying lying tying news innings outings cannings howe proceed exceed succeed"
    )
    found = {word for word in re.findall("[a-z0-9]+", text.lower()) if len(word) > 2}

    stemmer = PorterStemmer()

    assert len(found) > 3000
    assert {word: stem(word) for word in found | set(irregular.split())} == {
        word: stemmer.stem(word) for word in found | set(irregular.split())
    }

"""Each metric against the library it comes from, and every metric against the contract."""

import math
import subprocess
import sys

import pytest

from redco_flow.metrics import bits_per_byte, bleu, exact_match, perplexity, rouge
from redco_flow.metrics.metric import (
    ExampleMetric,
    Metric,
    PooledMetric,
    Score,
    counts_bytes,
    find_any_metric,
    find_metric,
    find_score,
    metric_names,
    reads_of,
)

METRICS = [
    name
    for name in metric_names()
    if isinstance(metric := find_any_metric(name), Metric) and reads_of(metric) != "rows"
]
METRICS_OF_TEXTS = [
    name
    for name in METRICS
    if isinstance(metric := find_metric(name), ExampleMetric)
    and reads_of(metric) in ("texts", "classes")
]

PREDICTIONS = ["the cat sat on mat", "a dog", "Blue Spice is a pub in the city centre.", ""]
REFERENCES = [
    ["the cat sat on the mat", "a cat is on the mat"],
    ["a dog"],
    ["Blue Spice is a coffee shop in the city centre.", "A pub, Blue Spice, is in the centre."],
    ["something", "else", "entirely"],
]


@pytest.mark.parametrize("name", METRICS_OF_TEXTS)
def test_every_metric_gives_its_keys_for_the_set_and_for_each_example(name):
    metric = find_metric(name)

    whole = metric.compute(PREDICTIONS, REFERENCES)
    each = metric.per_example(PREDICTIONS, REFERENCES)

    assert set(whole) == set(each) == set(metric.KEYS)
    assert set(metric.KEYS.values()) <= {"max", "min"}
    assert all(len(scores) == len(PREDICTIONS) for scores in each.values())
    assert all(0 <= score <= 100 for scores in each.values() for score in scores)


@pytest.mark.parametrize("name", METRICS_OF_TEXTS)
def test_every_metric_gives_a_perfect_prediction_100(name):
    metric = find_metric(name)
    texts = ["Blue Spice is a pub in the city centre.", "a dog and a cat sat on the mat"]

    whole = metric.compute(texts, [[text, "another text"] for text in texts])

    assert all(score == pytest.approx(100.0) for score in whole.values())


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize(
    ("predictions", "references"), [([], []), (["a"], []), (["a"], [[]])], ids=str
)
def test_every_metric_refuses_what_it_cannot_score(name, predictions, references):
    with pytest.raises(ValueError, match=r"reference|nothing to score"):
        find_metric(name).compute(predictions, references)


@pytest.mark.parametrize("name", METRICS_OF_TEXTS)
def test_the_pooled_score_of_a_metric_is_that_of_its_summed_statistics(name):
    metric = find_metric(name)
    if not isinstance(metric, PooledMetric):
        each = metric.per_example(PREDICTIONS, REFERENCES)
        pooled = {key: sum(scores) / len(scores) for key, scores in each.items()}
    else:
        statistics = metric.statistics(PREDICTIONS, REFERENCES)
        pooled = metric.from_statistics([sum(column) for column in zip(*statistics, strict=True)])

    assert pooled == pytest.approx(metric.compute(PREDICTIONS, REFERENCES))


def test_bleu_equals_sacrebleu_with_unequal_numbers_of_references():
    from sacrebleu.metrics.bleu import BLEU

    streams = [
        [texts[i] if i < len(texts) else None for texts in REFERENCES]
        for i in range(max(map(len, REFERENCES)))
    ]

    expected = BLEU().corpus_score(PREDICTIONS, streams).score

    assert bleu.compute(PREDICTIONS, REFERENCES)["bleu"] == pytest.approx(expected, abs=1e-9)


def test_rouge_takes_the_best_reference_for_each_score():
    # By hand: unigrams of "the cat sat" in "the cat": P 2/3, R 1, F 0.8; "sat there": F 0.4.
    scores = rouge.per_example(["the cat sat"], [["sat there", "the cat"]])

    assert scores["rouge1"] == [pytest.approx(80.0)]
    assert scores["rouge2"] == [pytest.approx(100 * 2 * (1 / 2) * 1 / (1 / 2 + 1))]


def test_exact_match_ignores_white_space_and_nothing_else():
    predictions = ["a  b ", "A b", "c"]
    references = [["a b"], ["a b"], ["x", "c"]]

    assert exact_match.per_example(predictions, references)["exact_match"] == [100.0, 0.0, 100.0]


def test_perplexity_is_of_all_tokens_together():
    # By hand: 3 tokens at a loss of 1 nat and 1 token at 5 are 8 nats over 4 tokens.
    rows = perplexity.likelihood_statistics([3.0, 5.0], [3, 1])

    whole = perplexity.from_statistics([sum(column) for column in zip(*rows, strict=True)])
    each = perplexity.of_likelihoods([3.0, 5.0], [3, 1])

    assert whole == {"perplexity": pytest.approx(math.e**2)}
    assert each == {"perplexity": [pytest.approx(math.e), pytest.approx(math.e**5)]}
    assert math.isfinite(perplexity.perplexity(10**6))


def test_bits_per_byte_are_of_all_bytes_together():
    # By hand: 8 bits of loss over 4 bytes.
    rows = bits_per_byte.likelihood_statistics([3 * math.log(2), 5 * math.log(2)], [3, 1])

    whole = bits_per_byte.from_statistics([sum(column) for column in zip(*rows, strict=True)])
    each = bits_per_byte.of_likelihoods([3 * math.log(2), 5 * math.log(2)], [3, 1])

    assert whole == {"bits_per_byte": pytest.approx(2.0)}
    assert each == {"bits_per_byte": [pytest.approx(1.0), pytest.approx(5.0)]}
    assert counts_bytes(bits_per_byte)
    assert not counts_bytes(perplexity)


def test_a_metric_of_likelihoods_scores_no_texts():
    with pytest.raises(ValueError, match="'perplexity' is of likelihoods, and scores no"):
        find_metric("perplexity")
    with pytest.raises(ValueError, match="no metric gives a score 'perplexity'"):
        find_score("perplexity")


def test_a_score_names_the_metric_that_gives_it():
    assert find_score("rouge2") == Score("rouge", "rouge2")
    with pytest.raises(ValueError, match=r"no metric gives a score 'ruge2'.*rougeL"):
        find_score("ruge2")


def test_an_unknown_metric_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ValueError, match="exact_match, f1, f1_macro, image_retrieval, mae"):
        find_metric("blue")
    with pytest.raises(ValueError, match="there is no module no_such"):
        find_metric("no_such_package.metric")
    with pytest.raises(ValueError, match=r"lacks KEYS, compute\."):
        find_metric("json.decoder")


def test_naming_the_metrics_imports_no_scoring_library():
    code = (
        "import sys; from redco_flow.metrics.metric import find_any_metric, metric_names; "
        "[find_any_metric(n) for n in metric_names()]; "
        "assert not {'sacrebleu', 'numpy'} & set(sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

"""promote, rollback and aliases, and an alias wherever a checkpoint is named."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest

from redco_flow.cli.main import run_command
from redco_flow.tracking.aliases import AliasName, AliasStore
from redco_flow.tracking.promotion import (
    Condition,
    NotPromoted,
    PromotionRequest,
    PromotionRule,
    promote,
)
from tests.cli.promoting import NUM_ROWS, Shop, right, shuffled

IF_BETTER = ("--if", "exact_match > production")


@pytest.fixture
def shop(tmp_path):
    return Shop(tmp_path)


@pytest.fixture
def say(shop, capsys, monkeypatch):
    """Run a verb; return its exit code, and what it says on both streams."""
    monkeypatch.setenv("REDCO_FLOW_WORKSPACE", str(shop.workspace.root))

    def say(*words):
        code = run_command([str(word) for word in words])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return say


@pytest.fixture
def names(say):
    """What an alias names now; empty where it names nothing."""

    def names(alias="@demo/production"):
        found = {one["alias"]: one["checkpoint"] for one in json.loads(say("aliases", "--json")[1])}
        return found.get(alias, "")

    return names


def test_a_checkpoint_is_promoted_under_the_name_of_its_pipeline(shop, say, names):
    checkpoint = shop.checkpoint("first", pipeline="weekly")

    code, out, _ = say(
        "promote", checkpoint.short_id, "--as", "production", "--reason", "the first"
    )

    assert code == 0
    assert out == f"@weekly/production names checkpoint {checkpoint.short_id}.\n"
    assert names("@weekly/production") == checkpoint.id
    _, history, _ = say("aliases", "@production")
    assert "the first" in history


def test_the_model_can_be_named_on_the_command_line(shop, say, names):
    checkpoint = shop.checkpoint("first")

    say("promote", checkpoint.id, "--as", "production", "--model", "other")

    assert (names(), names("@other/production")) == ("", checkpoint.id)


def test_the_first_of_a_name_has_none_to_be_better_than(shop, say, names):
    first = shop.checkpoint("first")

    code, out, _ = say("promote", first.id, "--as", "production", *IF_BETTER)

    assert code == 0
    assert "it is the first of this name" in out
    assert names() == first.id


def test_a_score_that_the_checkpoint_lacks_is_refused_for_the_first_of_a_name_too(shop, say, names):
    first = shop.checkpoint("first")
    shop.evaluation(first, right(100))

    code, _, err = say("promote", first.id, "--as", "production", "--if", "exactmatch > production")

    assert code == 1
    assert "has no score 'exactmatch'" in err


def test_what_is_clearly_better_is_promoted_and_the_history_says_by_what(shop, say, names):
    first, second = shop.checkpoint("first"), shop.checkpoint("second")
    ours, theirs = right(150), right(100)
    shop.evaluation(first, theirs)
    shop.evaluation(second, ours)
    say("promote", first.id, "--as", "production")

    code, out, _ = say("promote", second.id, "--as", "production", *IF_BETTER, "--json")

    assert code == 0
    assert names() == second.id
    [held] = json.loads(out)["history"][-1]["comparisons"]
    assert (held["score"], held["than_score"], held["gain"]) == (75.0, 50.0, 25.0)
    # 50 of 200 rows gained, none lost: the gain is 100 x a binomial share.
    spread = 100 * np.sqrt(0.25 * 0.75 / NUM_ROWS)
    # 10,000 draws: an end of the interval is known to about a tenth of the spread.
    assert held["low"] == pytest.approx(25 - 1.96 * spread, abs=0.15 * spread)
    assert held["high"] == pytest.approx(25 + 1.96 * spread, abs=0.15 * spread)
    _, history, _ = say("aliases", "production")
    assert "75 against 50, a gain of 25 (95% interval" in history


def test_one_of_several_tasks_of_the_harness_decides_by_its_own_rows(shop, say, names):
    first, second = shop.checkpoint("first"), shop.checkpoint("second")
    shop.of_tasks(first, right(100))
    shop.of_tasks(second, right(150))
    say("promote", first.id, "--as", "production")
    condition = "hard/acc > production"

    code, out, err = say("promote", second.id, "--as", "production", "--if", condition, "--json")

    assert (code, names()) == (0, second.id), err
    [held] = json.loads(out)["history"][-1]["comparisons"]
    spread = np.sqrt(0.25 * 0.75 / NUM_ROWS)  # as of the evaluation above
    assert held["low"] == pytest.approx(0.25 - 1.96 * spread, abs=0.15 * spread)
    assert held["num_examples"] == NUM_ROWS
    third = shop.checkpoint("third")
    again = ("promote", third.id, "--as", "production", "--if", condition)
    shop.of_tasks(third, right(190), num_examples=50)
    assert "is partial: the first 50 rows of hard." in say(*again)[2]
    shop.of_tasks(third, right(180), data="2" * 64)
    assert "other metric settings" in say(*again)[2]
    shop.of_tasks(third, right(190), num_examples=NUM_ROWS)
    assert say(*again)[0] == 0


def promoted_pair(shop, say, first_right, second_right, **second_more):
    """A checkpoint in production and another beside it, both evaluated; the second one."""
    first, second = shop.checkpoint("first"), shop.checkpoint("second")
    shop.evaluation(first, first_right)
    shop.evaluation(second, second_right, **second_more)
    say("promote", first.id, "--as", "production")
    return first, second


@pytest.mark.parametrize(
    ("rows", "options", "reason"),
    [
        (right(100), IF_BETTER, "exact_match 50 is no better than @demo/production's 50"),
        (right(60), IF_BETTER, "exact_match 30 is no better than @demo/production's 50 (gain -20)"),
        (right(120), (*IF_BETTER, "--min-gain", "12"), "by 10, and the gain has to be at least 12"),
        (shuffled(104, seed=1), IF_BETTER, "but the 95% interval of that gain"),
        (right(120), ("--if", "exact_match > 60"), "exact_match 60 is no better than 60"),
        (
            right(120),
            ("--if", "bleu > production"),
            "has no score 'bleu' (its scores: exact_match)",
        ),
    ],
)
def test_a_checkpoint_that_is_not_surely_better_is_refused_with_the_reason(
    shop, say, names, rows, options, reason
):
    first, second = promoted_pair(shop, say, right(100), rows)

    code, _, said = say("promote", second.id, "--as", "production", *options)

    assert code == 1
    assert reason in said
    assert names() == first.id


def test_of_a_metric_that_is_better_where_it_is_smaller_less_is_a_gain(shop, say, names):
    first, second = shop.checkpoint("first"), shop.checkpoint("second")
    for one, loss in ((first, np.log(4.0)), (second, np.log(3.0))):
        shop.evaluation(one, right(0), metrics=["perplexity"], loss=float(loss))
    say("promote", first.id, "--as", "production")

    refused, _, _ = say("promote", second.id, "--as", "production", "--if", "perplexity < 2")
    code, out, _ = say(
        "promote", second.id, "--as", "production", "--if", "perplexity < production", "--json"
    )

    assert (refused, code) == (1, 0)
    [held] = json.loads(out)["history"][-1]["comparisons"]
    # All rows gain the same, so every draw does: from 4 to 3, to rounding.
    for key in ("gain", "low", "high"):
        assert held[key] == pytest.approx(1.0, abs=1e-9)
    assert names() == second.id


def test_less_confidence_lets_a_smaller_gain_pass(shop, say, names):
    # 108 against 100 of other rows: better by 4, with a spread of about 5.
    _, second = promoted_pair(shop, say, shuffled(100, seed=2), shuffled(108, seed=3))

    refused, _, said = say("promote", second.id, "--as", "production", *IF_BETTER)
    code, _, _ = say("promote", second.id, "--as", "production", *IF_BETTER, "--confidence", "0.5")

    assert refused == 1
    assert "holds 0" in said
    assert code == 0
    assert names() == second.id


def test_evaluations_of_other_rows_are_refused(shop, say, names):
    other = shop.dataset(NUM_ROWS, "other rows")
    first, second = promoted_pair(shop, say, right(100), right(190), data=other)

    code, _, said = say("promote", second.id, "--as", "production", *IF_BETTER)

    assert code == 1
    assert f"of other datasets: 200 of 'test' of dataset {other.short_id}" in said
    assert 'checkpoint: "@demo/production"' in said
    assert names() == first.id


@pytest.mark.parametrize("key", ["exact_match", "val/exact_match"])
def test_a_score_of_the_trainings_own_validation_decides_no_promotion(shop, say, names, key):
    checkpoint = shop.checkpoint("trained", validation={"exact_match": 99.0})

    code, _, said = say("promote", checkpoint.id, "--as", "production", "--if", f"{key} > 10")

    assert code == 1
    assert f"has no score '{key}' (it was never evaluated; val/exact_match was" in said
    assert names() == ""


def test_evaluations_by_other_code_are_refused(shop, say, names):
    code_then = {"redco_flow.metrics.exact_match": "2" * 64}
    first, second = promoted_pair(shop, say, right(100), right(190), code=code_then)

    code, _, said = say("promote", second.id, "--as", "production", *IF_BETTER)

    assert code == 1
    assert "by 'exact_match': other metric code: redco_flow.metrics.exact_match;" in said
    assert names() == first.id


def test_evaluations_of_texts_that_were_decoded_otherwise_are_refused(shop, say, names):
    first, second = promoted_pair(shop, say, right(100), right(190), num_beams=4)

    code, _, said = say("promote", second.id, "--as", "production", *IF_BETTER)

    assert code == 1
    assert "were decoded by other settings: num_beams 4 and 1." in said
    assert names() == first.id


@pytest.mark.parametrize("condition", ["exact_match > production", "exact_match > 10"])
def test_partial_evaluations_are_refused(shop, say, names, condition):
    first, second = promoted_pair(shop, say, right(100), right(50, num_rows=60))

    code, _, said = say("promote", second.id, "--as", "production", "--if", condition)

    assert code == 1
    assert "is partial: 60 of the 200 rows of 'test'" in said
    assert names() == first.id


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_two_promotions_at_once_the_second_has_to_be_better_than_the_first(shop, order):
    made = [shop.checkpoint(name) for name in ("first", "better", "best")]
    for one, num_right in zip(made, (80, 120, 160), strict=True):
        shop.evaluation(one, right(num_right))
    name = AliasName("demo", "production")
    promote(shop.workspace, PromotionRequest(made[0], name, PromotionRule()))
    rule = PromotionRule((Condition.parse("exact_match > production"),))
    begin = Barrier(2)

    def ask(checkpoint):
        begin.wait()
        try:
            promote(shop.workspace, PromotionRequest(checkpoint, name, rule))
        except NotPromoted:
            return False
        return True

    with ThreadPoolExecutor(2) as pool:
        promoted = list(pool.map(ask, [made[1:][index] for index in order]))

    alias = AliasStore(shop.workspace).find(name)
    assert alias.checkpoint == made[2].id
    assert len(alias.history) == 1 + sum(promoted)
    judged = [one.comparisons[0]["than_checkpoint"] for one in alias.history[1:]]
    assert judged == [one.checkpoint for one in alias.history[:-1]]


def test_a_later_evaluation_that_can_be_compared_is_the_one_that_counts(shop, say, names):
    _, second = promoted_pair(shop, say, right(100), right(50, num_rows=60))
    shop.evaluation(second, right(180))

    code, _, _ = say("promote", second.id, "--as", "production", *IF_BETTER)

    assert code == 0
    assert names() == second.id


def damage(artifact):
    path = next(path for path in sorted(artifact.path.rglob("*")) if path.is_file())
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    os.chmod(path, 0o644)
    path.write_bytes(bytes(content))


def test_a_damaged_checkpoint_is_refused_even_without_a_condition(shop, say, names):
    checkpoint = shop.checkpoint("first")
    damage(checkpoint)

    code, _, said = say("promote", checkpoint.id, "--as", "production")

    assert code == 1
    assert f"checkpoint {checkpoint.short_id} is damaged, and no alias was moved" in said
    assert names() == ""


def test_a_damaged_evaluation_is_refused(shop, say, names):
    first, second = shop.checkpoint("first"), shop.checkpoint("second")
    shop.evaluation(first, right(100))
    damage(shop.evaluation(second, right(190)))
    say("promote", first.id, "--as", "production")

    code, _, said = say("promote", second.id, "--as", "production", *IF_BETTER)

    assert code == 1
    assert "metrics" in said
    assert "is damaged" in said
    assert names() == first.id


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--if", "exact_match < production"), "better where it is larger"),
        (("--if", "exact_match > prodcution"), "nothing was promoted as @demo/prodcution"),
        (("--if", "exact_match"), "is no condition"),
        (("--min-gain", "1"), "--min-gain is for --if"),
        ((*IF_BETTER, "--min-gain", "-1"), "a gain is 0 or more"),
        ((*IF_BETTER, "--min-gain", "nan"), "a gain is 0 or more"),
        ((*IF_BETTER, "--confidence", "95"), "it is between 0 and 1"),
    ],
)
def test_what_cannot_be_meant_is_a_usage_error(shop, say, names, words, reason):
    first, second = promoted_pair(shop, say, right(100), right(190))

    code, _, said = say("promote", second.id, "--as", "production", *words)

    assert code == 2
    assert reason in said
    assert names() == first.id


def test_promoting_what_is_there_already_changes_nothing(shop, say):
    first = shop.checkpoint("first")
    say("promote", first.id, "--as", "production")

    code, out, _ = say("promote", first.id, "--as", "production", *IF_BETTER)

    assert code == 0
    assert "already: nothing was changed" in out
    [alias] = json.loads(say("aliases", "--json")[1])
    assert len(alias["history"]) == 1


def test_rollback_names_again_what_was_named_before_and_says_why(shop, say, names):
    first, second = shop.checkpoint("first"), shop.checkpoint("second")
    for one in (first, second):
        say("promote", one.id, "--as", "production")

    code, out, _ = say("rollback", "--reason", "it swears")

    assert code == 0
    assert first.short_id in out
    assert names() == first.id
    assert "it swears" in say("aliases", "production")[1]
    code, _, said = say("rollback", "production")
    assert code == 2
    assert "the first that was promoted" in said


def test_a_rollback_to_a_damaged_checkpoint_is_refused(shop, say, names):
    first, second = shop.checkpoint("first"), shop.checkpoint("second")
    for one in (first, second):
        say("promote", one.id, "--as", "production")
    damage(first)

    code, _, said = say("rollback")

    assert code == 1
    assert "is damaged, and no alias was moved" in said
    assert names() == second.id


def test_verbs_that_take_an_artifact_take_its_alias(shop, say):
    checkpoint = shop.checkpoint("first")
    shop.evaluation(checkpoint, right(100))
    say("promote", checkpoint.id, "--as", "production", "--reason", "good enough")

    for verb in ("why", "impact"):
        for alias in ("@production", "@demo/production"):
            _, out, _ = say(verb, alias)
            assert out.startswith(f"artifact checkpoint {checkpoint.short_id}")
    assert say("verify", "@production")[1] == "1 of 1 artifacts are whole\n"
    code, _, said = say("promote", "@production", "--as", "staging")
    assert (code, said) == (0, "")


def test_why_and_artifacts_say_which_aliases_name_a_checkpoint(shop, say):
    first, second = shop.checkpoint("first"), shop.checkpoint("second")
    say("promote", first.id, "--as", "production", "--reason", "good enough")

    assert "is @demo/production: promoted by" in say("why", first.id)[1]
    assert "good enough" in say("why", first.id)[1]
    assert "@demo" not in say("why", second.id)[1]
    listed = {one["id"]: one["aliases"] for one in json.loads(say("artifacts", "--json")[1])}
    assert (listed[first.id], listed[second.id]) == (["@demo/production"], [])
    assert json.loads(say("why", first.id, "--json")[1])["aliases"][0]["name"] == "@demo/production"


def test_aliases_list_the_scores_that_their_checkpoints_were_promoted_with(shop, say):
    first, second = promoted_pair(shop, say, right(100), right(150))
    say("promote", second.id, "--as", "production")

    _, out, _ = say("aliases")

    [header, line] = out.splitlines()
    assert header.split() == ["ALIAS", "CHECKPOINT", "METRICS", "SINCE", "BY", "BEFORE"]
    assert line.startswith(f"@demo/production  {second.short_id}  exact_match 75")
    assert line.endswith(first.short_id)


def test_a_secret_in_the_reason_is_not_written(shop, say, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123456789abcdef01234567")
    checkpoint = shop.checkpoint("first")

    reason = "because 0123456789abcdef0123456789abcdef01234567 said so"
    say("promote", checkpoint.id, "--as", "production", "--reason", reason)

    [path] = shop.workspace.aliases.rglob("*.json")
    assert "0123456789abcdef" not in path.read_text()
    assert "said so" in path.read_text()

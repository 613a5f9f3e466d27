"""Which process of which start harms itself, and when."""

import pytest

from redco_flow.launch.processes import FAULT_VARIABLE, FAULTS
from redco_flow.recipes import drill
from redco_flow.recipes.drill import NUM_BATCHES_BEFORE
from redco_flow.stages.preprocess.tokenizer import save_tokenizer, train_tokenizer
from redco_flow.text.tokenizer import TextTokenizer

MODEL = {
    "family": "t5",
    "config": {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_heads": 2, "num_layers": 1},
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_tokenizer(["a few words, and some more words"] * 9, 280, "bpe"), folder)
    return TextTokenizer.load(folder)


@pytest.fixture
def harm(monkeypatch):
    """Replace the harm by a note of it; return the notes."""
    notes = []
    monkeypatch.setattr(drill, "HARMS", {"slow": lambda: bool(notes.append("slow") or True)})
    monkeypatch.setenv(FAULT_VARIABLE, "slow")
    monkeypatch.setenv("REDCO_FLOW_ATTEMPT", "/runs/r/stages/train/attempts/1")
    return notes


def collate_batches(tokenizer, count):
    recipe = drill.build(MODEL, tokenizer, source_length=4, target_length=4)
    collate = recipe.collate_to([4, 4])
    example = {"source_ids": [3, 1], "target_ids": [3, 1]}
    for _ in range(count):
        collate([example])


def test_the_harm_begins_in_the_middle_and_a_lasting_one_goes_on(harm, tokenizer):
    collate_batches(tokenizer, NUM_BATCHES_BEFORE - 1)
    assert harm == []

    collate_batches(tokenizer, NUM_BATCHES_BEFORE + 2)
    assert harm == ["slow"] * 3


def test_batches_of_all_widths_are_counted_together(harm, tokenizer):
    recipe = drill.build(MODEL, tokenizer, source_length=4, target_length=4)
    narrow, wide = recipe.collate_to([2, 2]), recipe.collate_to([4, 4])
    example = {"source_ids": [3, 1], "target_ids": [3, 1]}

    for _ in range(NUM_BATCHES_BEFORE // 2):
        narrow([example])
        wide([example])

    assert harm == ["slow"]


@pytest.mark.parametrize(
    "place",
    [
        {"REDCO_FLOW_RESTART": "1"},
        {"REDCO_FLOW_ATTEMPT": "/runs/r/stages/train/attempts/2"},
        {"REDCO_FLOW_NUM_PROCESSES": "4", "REDCO_FLOW_RANK": "0"},
        {"REDCO_FLOW_NUM_PROCESSES": "4", "REDCO_FLOW_RANK": "2"},
    ],
    ids=["a requeued job", "a new attempt", "the first rank", "the third rank"],
)
def test_others_are_left_in_peace(harm, tokenizer, monkeypatch, place):
    for name, value in place.items():
        monkeypatch.setenv(name, value)

    collate_batches(tokenizer, NUM_BATCHES_BEFORE + 1)

    assert harm == []


def test_an_unknown_fault_is_refused(harm, tokenizer, monkeypatch):
    monkeypatch.setenv(FAULT_VARIABLE, "flood")

    with pytest.raises(ValueError, match="must be one of slow"):
        collate_batches(tokenizer, 1)


def test_the_recipe_can_do_every_fault_of_the_drill():
    assert tuple(drill.HARMS) == FAULTS

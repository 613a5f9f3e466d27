"""Windows over one stream of tokens: what they hold, training on them, and resuming."""

import json

import jax
import numpy as np
import pytest
from stage_kinds import preprocess, train
from tokenizers import processors

from redco_flow.engine.deployer import Deployer
from redco_flow.engine.errors import DataError
from redco_flow.recipes.find import find_recipe
from redco_flow.recipes.recipe import TokenLengths
from redco_flow.spec.load import settings_of
from redco_flow.stages.artifacts.checkpoint import CheckpointArtifact
from redco_flow.stages.artifacts.dataset import DatasetArtifact
from redco_flow.stages.train.data import Span, TokenStream, TokenWindows, read_training_data
from redco_flow.stages.train.planned_data import _widths
from redco_flow.text.tokenizer import TextTokenizer

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
TEXTS = [f"{a} and {b}\n{b}" for a in WORDS for b in WORDS]
RECIPE = {"recipe": "language_modeling"}
LENGTH = 16
SETTINGS = RECIPE | {
    "model": {"config": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": LENGTH}},
    "max_steps": 9,
    "global_batch_size": 8,
    "learning_rate": 0.01,
    "schedule": {"type": "cosine", "warmup_steps": 2, "min_lr_ratio": 0.5},
    "betas": [0.9, 0.99],
    "epsilon": 1e-6,
    "label_smoothing": 0.1,
    "dropout_rate": 0.0,
    "batching": {"type": "windows", "window_length": LENGTH, "random_offsets": True},
    "eval": {"every_steps": 4},
    "keep": {"last": 2},
    "log_every_steps": 1,
}


def stream(*lengths):
    """Texts of so many tokens, numbered from 0."""
    ends = np.cumsum(lengths)
    return TokenStream(np.split(np.arange(ends[-1], dtype=np.int32), ends[:-1]))


def tokens(window):
    return [*window["source_ids"].tolist(), *window["target_ids"].tolist()]


def test_a_stream_is_read_over_the_ends_of_its_texts():
    found = stream(3, 0, 4, 5)

    assert len(found) == 12
    for start in range(12):
        for stop in range(start, 13):
            assert found.read(start, stop).tolist() == list(range(start, stop))


def test_windows_side_by_side_predict_each_token_but_the_first_once():
    windows = TokenWindows(stream(7, 4), [Span("text", 0, 11)], 4, at_every_token=False)

    assert [tokens(one) for one in windows] == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8], [8, 9, 10]]
    assert windows.num_predicted == 10


def test_windows_at_every_token_are_all_there_are():
    windows = TokenWindows(stream(7, 4), [Span("text", 0, 11)], 4, at_every_token=True)

    assert [tokens(one) for one in windows] == [list(range(i, i + 5)) for i in range(7)]
    (part,) = windows.parts()
    assert (part.num_rows, part.epoch_length) == (7, 3)


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_window_has_tokens_of_one_span_alone(everywhere):
    spans = [Span("a", 0, 7), Span("b", 7, 6)]
    windows = TokenWindows(stream(13), spans, 4, at_every_token=everywhere)

    first, second = windows.parts()

    assert (first.start, second.start) == (0, first.num_rows)
    assert first.num_rows + second.num_rows == len(windows)
    for index, window in enumerate(windows):
        assert (max(tokens(window)) < 7) == (index < first.num_rows)
        assert (min(tokens(window)) >= 7) == (index >= first.num_rows)


def test_a_span_that_is_too_short_is_told():
    with pytest.raises(DataError, match="b has 4 tokens, and a window takes 5 at least"):
        TokenWindows(stream(13), [Span("b", 7, 4)], 4, at_every_token=True)


@pytest.fixture(scope="module")
def dataset(shared_bench):
    path = shared_bench.root / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    data = {
        "train": str(path),
        "text_key": "text",
        "validation_fraction": 0.2,
        "tokenizer": {"train": {"type": "character"}},
    }
    return shared_bench.run(preprocess, RECIPE | {"data": data, "max_target_length": 12})["dataset"]


@pytest.fixture(scope="module")
def trained(shared_bench, dataset):
    checkpoint = shared_bench.run(train, SETTINGS, {"dataset": [dataset]}, work="trained")
    return checkpoint["checkpoint/last"], shared_bench.records()


def params_of(artifact):
    checkpoint = CheckpointArtifact(artifact.path)
    return jax.tree.leaves(checkpoint.load_params(checkpoint.build_recipe(), Deployer()))


def test_a_character_tokenizer_gives_every_character_a_token_of_its_own(dataset):
    artifact = DatasetArtifact(dataset.path)
    tokenizer = artifact.tokenizer

    characters = sorted(set("".join(TEXTS)))
    assert tokenizer.vocab_size == 3 + len(characters)
    (ids,) = tokenizer.encode_batch(["one\ntwo, é"])
    assert ids == [3 + characters.index(one) if one in characters else 2 for one in "one\ntwo, é"]
    assert tokenizer.decode_batch([ids]) == [
        "one\ntwo"
    ]  # as of every tokenizer, without outer white space
    # A text that says "</s>" is text.
    assert tokenizer.eos_id not in tokenizer.encode_batch(["</s>"])[0]
    # All texts, each with its end, whatever pieces they are kept in.
    split = artifact.split("train")
    flat = np.concatenate(split.flat("target_ids"))
    assert flat.tolist() == [one for row in split for one in row["target_ids"].tolist()]


def test_transformers_reads_a_character_tokenizer(dataset):
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    artifact = DatasetArtifact(dataset.path)
    theirs = transformers.AutoTokenizer.from_pretrained(str(dataset.path / "tokenizer"))

    for text in TEXTS[:5]:
        found = theirs(text, add_special_tokens=False)["input_ids"]
        assert [found] == artifact.tokenizer.encode_batch([text])
        assert theirs.decode(found) == text


def test_windows_have_room_for_the_token_that_every_row_begins_with(dataset):
    """As LLaMA's tokenizers put it before every text."""
    artifact = DatasetArtifact(dataset.path)
    tokenizer = artifact.tokenizer
    start = (tokenizer.backend.id_to_token(tokenizer.eos_id), tokenizer.eos_id)
    tokenizer.backend.post_processor = processors.TemplateProcessing(
        single=f"{start[0]} $A", special_tokens=[start]
    )
    tokenizer = TextTokenizer(tokenizer.backend, tokenizer.pad_id, tokenizer.eos_id)
    model = {"config": SETTINGS["model"]["config"] | {"n_positions": LENGTH + 1}}
    recipe = find_recipe(RECIPE["recipe"]).make(model, TokenLengths(tokenizer, 1, LENGTH))

    data = read_training_data(artifact, recipe, train.Config.from_json(SETTINGS), None)

    window = data.examples[0]
    batch = data.collate_fn([window])
    row = [tokenizer.eos_id, *tokens(window)]
    assert batch["input_ids"][0, : LENGTH + 1].tolist() == row[:-1]
    assert batch["labels"][0, 1 : LENGTH + 1].tolist() == window["target_ids"].tolist()
    planned = _widths(recipe, train.Config.from_json(SETTINGS), (1, LENGTH))
    assert planned == [data.widest_batch()["input_ids"].shape[1]]


@pytest.mark.slow
def test_a_model_is_trained_on_windows_for_so_many_steps(trained, dataset):
    checkpoint, records = trained

    record = CheckpointArtifact(checkpoint.path).record
    assert (record.step, record.target_length) == (9, LENGTH)
    logged = [one for one in records if one["kind"] == "training"]
    assert [one["step"] for one in logged] == list(range(1, 10))
    cosine = [0.5 + 0.5 * 0.5 * (1 + np.cos(np.pi * step / 7)) for step in range(7)]
    rates = [one["learning_rate"] for one in logged]
    assert rates == pytest.approx([0.0, 0.005, *(0.01 * share for share in cosine)], rel=1e-5)
    scores = [(one["step"], one["metrics"]) for one in records if one["kind"] == "evaluation"]
    assert [step for step, _ in scores] == [4, 8, 9]
    assert scores[-1][1]["eval_loss"] < scores[0][1]["eval_loss"]


@pytest.mark.slow
def test_the_validation_loss_is_that_of_torchs_gpt2_on_the_whole_stream(trained, dataset, tmp_path):
    """Each token once, from those before it in its window: a torch loop over slices."""
    torch = pytest.importorskip("torch", reason="pip install torch==2.13.0 (extra: reference)")
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    checkpoint, records = trained
    artifact = CheckpointArtifact(checkpoint.path)
    recipe = artifact.build_recipe()
    recipe.save_pretrained(artifact.load_params(recipe, Deployer()), tmp_path)
    model = transformers.GPT2LMHeadModel.from_pretrained(str(tmp_path)).eval()

    rows = DatasetArtifact(dataset.path).split("validation")
    ids = torch.tensor([one for row in rows for one in row["target_ids"].tolist()])
    total = 0.0
    for start in range(0, len(ids) - 1, LENGTH):
        window = ids[start : start + LENGTH + 1]
        with torch.no_grad():
            logits = model(window[None, :-1]).logits[0]
        total += float(torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum"))

    scores = [one["metrics"] for one in records if one["kind"] == "evaluation"][-1]
    assert scores["eval_loss"] == pytest.approx(total / (len(ids) - 1), rel=1e-5)


@pytest.mark.slow
def test_windows_at_random_offsets_are_resumed_exactly(shared_bench, dataset, trained):
    work = shared_bench.rewind("trained", 4)

    resumed = shared_bench.run(train, SETTINGS, {"dataset": [dataset]}, work=work)

    assert shared_bench.start_step() == 4
    for one, other in zip(
        params_of(resumed["checkpoint/last"]), params_of(trained[0]), strict=True
    ):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("batching", "message"),
    [
        ({"type": "windows"}, "needs 'window_length'"),
        ({"type": "packed", "window_length": 4}, "are for type windows, and the type is packed"),
        ({"random_offsets": True}, "are for type windows, and the type is padded"),
    ],
)
def test_windows_have_a_length_and_nothing_else_has_one(batching, message):
    with pytest.raises(ValueError, match=message):
        train.Config.from_json(RECIPE | {"batching": batching})


def test_a_recipe_of_pairs_has_no_windows():
    batching = {"type": "windows", "window_length": 8}
    with pytest.raises(ValueError, match="takes no plain texts, which windows are cut from"):
        train.Config.from_json({"recipe": "text_to_text", "batching": batching})


def test_a_training_without_windows_has_the_fingerprint_of_before():
    plain = settings_of(train.Config.from_json(RECIPE))["batching"]

    assert plain == {"type": "padded", "num_buckets": 4, "packed_length": None}


def test_plain_texts_have_no_source_to_be_cut(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text(json.dumps({"text": "a"}) + "\n")
    data = {"train": str(path), "text_key": "text", "tokenizer": {"train": {"type": "character"}}}
    with pytest.raises(ValueError, match="'max_source_length' would change nothing: plain texts"):
        preprocess.Config.from_json(RECIPE | {"data": data, "max_source_length": 64})

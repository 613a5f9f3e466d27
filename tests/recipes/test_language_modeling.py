"""The language-modeling recipe: rows of prompt and target, windows of texts, which models fit."""

import jax
import numpy as np
import pytest
from tokenizers import AddedToken, processors

from redco_flow.engine.data.packing import SEGMENT_IDS
from redco_flow.models.find import find_model
from redco_flow.recipes.language_modeling import build, encode, encode_texts
from redco_flow.recipes.recipe import Generation, RandomChoice
from redco_flow.stages.predict.run import count_bytes
from redco_flow.stages.preprocess.tokenizer import save_tokenizer, train_tokenizer
from redco_flow.text.tokenizer import TextTokenizer
from tests.drawn_params import draw_like

TINY = {
    "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 32, "resid_pdrop": 0.0,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
IGNORED = -100


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_tokenizer(["a few words, and some more words"] * 9, 280, "bpe"), folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder):
    return TextTokenizer.load(tokenizer_folder)


@pytest.fixture(scope="module")
def llama_tokenizer(tokenizer, tmp_path_factory):
    """One whose own template begins every text with a token, as LLaMA's does."""
    folder = tmp_path_factory.mktemp("llama")
    backend = train_tokenizer(["a few words"] * 9, 280, "bpe")
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    start = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", start)]
    )
    save_tokenizer(backend, folder)
    return TextTokenizer.load(folder)


def built(tokenizer, lengths=(8, 8), **model):
    model = model or {"config": TINY}
    return build(model, tokenizer, source_length=lengths[0], target_length=lengths[1])


def example(source, target):
    return {"row_id": "x:1", "source_ids": np.array(source), "target_ids": np.array(target)}


def test_a_prompt_goes_over_into_its_target_and_only_the_target_is_learnt(tokenizer):
    """Engine case 33: shifted once."""
    batch = built(tokenizer, (3, 5)).collate_fn([example([5, 6, 7], [8, 9, 1]), example([5], [1])])

    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9, 0, 0, 0], [5, 0, 0, 0, 0, 0, 0, 0]]
    assert batch["labels"].tolist() == [
        [IGNORED, IGNORED, 8, 9, 1, IGNORED, IGNORED, IGNORED],
        [1, *[IGNORED] * 7],
    ]


def test_every_token_of_a_plain_text_is_learnt_the_first_one_after_the_end_token(tokenizer):
    batch = built(tokenizer, (0, 4)).collate_fn([example([], [8, 9, 3, 1])])

    assert batch["input_ids"][0, :4].tolist() == [tokenizer.eos_id, 8, 9, 3]
    assert batch["labels"][0, :4].tolist() == [8, 9, 3, 1]


def test_a_row_begins_as_the_tokenizer_begins_every_text(llama_tokenizer):
    (start,) = llama_tokenizer.prefix_ids
    recipe = built(llama_tokenizer)

    batch = recipe.collate_fn([example([5, 6], [8, 1]), example([], [8, 1])])

    assert batch["input_ids"][:, :4].tolist() == [[start, 5, 6, 8], [start, 8, 0, 0]]
    assert batch["labels"][:, :4].tolist() == [[IGNORED, IGNORED, 8, 1], [8, 1, IGNORED, IGNORED]]


def test_the_widths_that_rows_are_said_to_need_are_those_that_they_take(tokenizer, llama_tokenizer):
    examples = [example([5] * s, [6] * t) for s, t in ((0, 1), (0, 7), (3, 1), (8, 8))]
    sides = [np.array([len(one[key]) for one in examples]) for key in ("source_ids", "target_ids")]

    for one in (tokenizer, llama_tokenizer):
        recipe = built(one)
        for row, (width,) in zip(examples, recipe.row_widths(*sides), strict=True):
            labels = recipe.collate_to([width])([row])["labels"]
            assert labels.shape == (1, width)
            assert labels[0, -1] != IGNORED


def test_packed_rows_hold_the_same_labels_after_the_same_inputs(tokenizer):
    examples = [example([5, 6], [7, 1]), example([], [8, 1]), example([9], [3, 4, 1])]
    recipe = built(tokenizer)

    packed = recipe.collate_packed(16)([examples[:2], examples[2:]])
    alone = recipe.collate_fn(examples)

    kept = alone["labels"] != IGNORED
    for name in ("input_ids", "labels"):
        found = packed[name][packed["labels"] != IGNORED].tolist()
        assert found == alone[name][kept].tolist()
    assert packed[SEGMENT_IDS].max(axis=1).tolist() == [2, 1]


def test_prompts_are_padded_on_the_left_and_hold_nothing_of_the_target(tokenizer):
    batch = built(tokenizer, (3, 5)).collate_prompts([example([5, 6], [9, 1]), example([], [9, 1])])

    assert batch["input_ids"].tolist() == [[0, 0, 0, 0, 0, 0, 5, 6], [0] * 7 + [1]]
    assert batch["attention_mask"].sum(axis=1).tolist() == [2, 1]


def test_a_prompt_fits_a_batch_of_its_own_width_and_no_narrower_one(llama_tokenizer):
    rows = [example([5, 6], [9, 1]), example([], [9, 1]), example([7] * 5, [1])]
    recipe = built(llama_tokenizer, (5, 3))

    widths = recipe.prompt_widths(np.array([len(row["source_ids"]) for row in rows]))

    assert widths.tolist() == [[3], [1], [6]]
    for row, (width,) in zip(rows, widths.tolist(), strict=True):
        batch = recipe.collate_prompts_to([width])([row])
        whole = recipe.collate_prompts([row])
        assert batch["attention_mask"].tolist() == [[1] * width]
        assert batch["input_ids"].tolist() == [whole["input_ids"][0, -width:].tolist()]
    with pytest.raises(ValueError, match="x:1: the prompt has 6 tokens; batches are 4 wide"):
        recipe.collate_prompts_to([4])(rows)


@pytest.mark.parametrize("key", ["source_ids", "target_ids"])
def test_a_token_outside_the_vocabulary_is_an_error_at_collate_time(tokenizer, key):
    """Engine case 44: the error comes where batches are made."""
    bad = example([5], [7, 1]) | {key: np.array([999, 1])}

    with pytest.raises(ValueError, match=rf"x:1: {key} holds token id 999, outside .* of 280"):
        built(tokenizer).collate_fn([bad])


def test_a_prompt_has_no_end_token_and_keeps_its_suffix_when_it_is_cut(tokenizer):
    lengths = {"max_source_length": 6, "max_target_length": 4}
    around = {"source_prefix": "some ", "source_suffix": " few"}

    pairs = encode(["more words " * 9, "a"], ["more", "words"], tokenizer, **around, **lengths)

    prefixed, suffix = tokenizer.encode_batch(["some more words more words", " few"])
    first, second = pairs.source_ids
    assert first == prefixed[: 6 - len(suffix)] + suffix
    assert tokenizer.eos_id not in first + second
    assert [ids[-1] for ids in pairs.target_ids] == [tokenizer.eos_id] * 2
    assert pairs.is_source_cut == [True, False]


def test_a_suffix_that_leaves_no_room_is_an_error(tokenizer):
    around = {"source_prefix": "", "source_suffix": " a few words and more words"}

    with pytest.raises(ValueError, match=r"data\.source_suffix, start, end"):
        encode(["a"], ["b"], tokenizer, **around, max_source_length=3, max_target_length=4)


def test_a_long_text_becomes_several_examples_that_together_are_the_text(tokenizer):
    text = "some words and a few more words " * 3

    pairs = encode_texts(["a", text], tokenizer, max_length=5)

    whole = tokenizer.encode_batch([text])[0]
    assert pairs.windows.text_of == [0] + [1] * (len(pairs.target_ids) - 1)
    assert [t for ids in pairs.target_ids[1:] for t in ids] == [*whole, tokenizer.eos_id]
    assert {len(ids) for ids in pairs.target_ids[1:-1]} == {5}
    assert pairs.source_ids == [[]] * len(pairs.target_ids)


@pytest.mark.parametrize("text", ["def f(x):\n    return 'あ🙂ñ'\n" * 3, "a \n  b\n"])
def test_the_bytes_of_a_texts_windows_are_those_of_the_text(tokenizer, text):
    """The tests' tokenizer is of bytes: windows are cut within characters and at spaces."""
    encoded = encode_texts(["before", text], tokenizer, max_length=3)
    row_ids = [f"a.txt:{row}" for row in encoded.windows.text_of]
    row_ids = [f"{one}#{at}" if one in row_ids[:at] else one for at, one in enumerate(row_ids)]
    rows = zip(row_ids, encoded.target_ids, strict=True)

    found = count_bytes([{"row_id": one, "target_ids": ids} for one, ids in rows], tokenizer)

    sizes = np.bincount(encoded.windows.text_of, found)
    assert sizes.tolist() == [len("before"), len(text.encode())]


def test_before_training_every_token_is_about_equally_likely_and_padding_changes_nothing(tokenizer):
    """Engine case 43: the reference is log V."""
    rows = [example([5, 6], [7, 1]), example([], [3, 4, 5, 1])]
    recipe = built(tokenizer)
    params = draw_like(recipe.abstract_params())
    keys = jax.random.split(jax.random.key(1), 2)

    found = [
        jax.jit(recipe.loss_fn, static_argnums=3)(params, collate(rows), keys, False)
        for collate in (recipe.collate_fn, recipe.collate_to([5]))
    ]

    (totals, weights), (narrow_totals, narrow_weights) = found
    # 1e-5: float32 sums over another number of masked positions.
    np.testing.assert_allclose(totals, narrow_totals, rtol=1e-5)
    assert weights.tolist() == narrow_weights.tolist() == [2, 4]
    np.testing.assert_allclose(totals / weights, np.log(280), rtol=0.1)


@pytest.mark.slow
def test_what_is_drawn_for_an_example_does_not_depend_on_those_beside_it(tokenizer):
    recipe = built(tokenizer)
    params = draw_like(recipe.abstract_params())
    rows = [example([5 + i] * (i + 1), [1]) for i in range(4)]
    keys = jax.random.split(jax.random.key(1), 4)
    draw = jax.jit(recipe.make_pred_fn(Generation(6, sampling=RandomChoice(0.9, 50, 0.95))))

    together = draw(params, recipe.collate_prompts(rows), keys)
    alone = [draw(params, recipe.collate_prompts([r]), keys[i : i + 1]) for i, r in enumerate(rows)]
    again = draw(params, recipe.collate_prompts(rows), jax.random.split(jax.random.key(2), 4))

    np.testing.assert_array_equal(together, np.concatenate(alone))
    assert not np.array_equal(together, again)


@pytest.mark.parametrize(
    ("lengths", "model", "message"),
    [
        ((8, 8), {"family": "t5"}, "trains gpt2, .* and not 't5'; for 't5' use recipe text_to_t"),
        ((8, 8), {"family": "bert"}, r"and not 'bert'; for 'bert' use recipe classification\.$"),
        ((8, 8), {"config": TINY | {"vocab_size": 100}}, "vocab_size is 100, and the tokenizer"),
        ((8, 8), {"config": TINY | {"eos_token_id": 5}}, "with token 5, the tokenizer with 1"),
        ((20, 16), {"config": TINY}, "up to 35 tokens, and the model's positions reach 32"),
    ],
)
def test_a_model_that_does_not_fit_is_an_error(tokenizer, lengths, model, message):
    with pytest.raises(ValueError, match=message):
        built(tokenizer, lengths, **model)


def test_texts_that_would_grow_beyond_the_learned_positions_are_refused(tokenizer):
    with pytest.raises(ValueError, match="prompt and new text have up to 33 tokens"):
        built(tokenizer).make_pred_fn(Generation(25))


def test_a_llama_has_no_table_of_positions_to_run_out_of(tokenizer):
    config = {
        "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 8,
    }  # fmt: skip

    recipe = built(tokenizer, (40, 40), family="llama", config=config)

    again = built(tokenizer, (40, 40), **recipe.model)
    assert recipe.collate_fn([example([5], [1])])["labels"].shape == (1, 80)
    assert again.model == recipe.model


_LLAMA = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
# Kinds of positions have their test in `tests/models/test_decoder_model.py`; these are the learned
# ones, layers without any, windows beside whole attention, sinks with experts, and a latent.
PACKED = {
    "gpt2": TINY,
    "smollm3": {**_LLAMA, "no_rope_layer_interval": 2},
    "gemma3_text": {**_LLAMA, "head_dim": 4, "sliding_window": 3, "sliding_window_pattern": 2,
                    "query_pre_attn_scalar": 4},
    "gpt_oss": {**_LLAMA, "head_dim": 4, "sliding_window": 3, "num_local_experts": 2,
                "num_experts_per_tok": 1},
    "deepseek_v3": {**_LLAMA, "num_key_value_heads": 4, "q_lora_rank": 6, "kv_lora_rank": 6,
                    "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4,
                    "first_k_dense_replace": 1, "moe_intermediate_size": 8, "n_routed_experts": 4,
                    "n_group": 2, "topk_group": 1, "num_experts_per_tok": 1},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family", PACKED)
def test_a_packed_row_has_the_loss_of_its_examples_alone(tokenizer, family):
    """Engine case 34: the loss is that of each document alone."""
    rows = [example([5, 6], [7, 8, 1]), example([], [3, 4, 5, 1]), example([9, 9, 9], [4, 1])]
    recipe = built(tokenizer, family=family, config=PACKED[family])
    params = draw_like(recipe.abstract_params())
    loss = jax.jit(recipe.loss_fn, static_argnums=3)
    keys = jax.random.split(jax.random.key(1), 3)

    alone, weights = loss(params, recipe.collate_fn(rows), keys, False)
    packed, packed_weights = loss(params, recipe.collate_packed(16)([rows]), keys[:1], False)

    assert weights.tolist() == [3, 4, 2]
    assert packed_weights.tolist() == [9]
    # 1e-5: float32 sums in other orders.
    np.testing.assert_allclose(packed.sum(), alone.sum(), rtol=1e-5)


def mixtral(tokenizer, **config):
    sizes = {**_LLAMA, "num_local_experts": 4}
    recipe = built(tokenizer, family="mixtral", config={**sizes, **config})
    return recipe, draw_like(recipe.abstract_params())


MIXED_ROWS = [example([5, 6], [7, 8, 1]), example([], [3, 4, 5, 1]), example([9, 9, 9], [4, 1])]


@pytest.mark.slow
def test_a_mixture_whose_config_says_so_is_trained_on_the_references_loss(tokenizer, tmp_path):
    """One example at a time, where the reference's loss is that example's."""
    torch = pytest.importorskip("torch", reason="pip install torch==2.13.0 (extra: reference)")
    import transformers

    recipe, params = mixtral(tokenizer, output_router_logits=True, router_aux_loss_coef=0.3)
    batch = recipe.collate_fn(MIXED_ROWS)
    recipe.save_pretrained(params, tmp_path)
    reference = transformers.MixtralForCausalLM.from_pretrained(tmp_path)
    loss = jax.jit(recipe.loss_fn, static_argnums=3)
    keys = jax.random.split(jax.random.key(1), 3)

    totals, weights, measures = loss(params, batch, keys, True)

    for row in range(len(MIXED_ROWS)):
        length = 1 + np.flatnonzero(batch["labels"][row] != IGNORED)[-1]
        ids, labels = (
            torch.tensor(batch[name][row : row + 1, :length], dtype=torch.int64)
            for name in ("input_ids", "labels")
        )
        with torch.no_grad():
            # Labels count in any case; those that it is to shift are given shifted beside them.
            expected = reference(input_ids=ids, labels=labels, shift_labels=labels)
        found = [totals[row] / weights[row], measures["load_balancing_loss"][row] / weights[row]]
        np.testing.assert_allclose(found, [expected.loss, expected.aux_loss], rtol=1e-5)


def test_a_packed_row_is_balanced_as_its_examples_alone(tokenizer):
    """Engine case 34: the loss is that of each document alone."""
    recipe, params = mixtral(tokenizer, output_router_logits=True, router_aux_loss_coef=0.3)
    loss = jax.jit(recipe.loss_fn, static_argnums=3)
    keys = jax.random.split(jax.random.key(1), 3)

    totals, _, measures = loss(params, recipe.collate_fn(MIXED_ROWS), keys, True)
    packed, _, packed_measures = loss(
        params, recipe.collate_packed(16)([MIXED_ROWS]), keys[:1], True
    )

    # 1e-5: float32 sums in other orders.
    np.testing.assert_allclose(packed.sum(), totals.sum(), rtol=1e-5)
    for name, values in measures.items():
        np.testing.assert_allclose(packed_measures[name].sum(), values.sum(), rtol=1e-5)


@pytest.mark.slow
def test_a_mixture_is_evaluated_on_its_texts_alone(tokenizer):
    recipe, params = mixtral(tokenizer, output_router_logits=True, router_aux_loss_coef=0.3)
    plain, _ = mixtral(tokenizer)
    batch, keys = recipe.collate_fn(MIXED_ROWS), jax.random.split(jax.random.key(1), 3)
    loss = jax.jit(recipe.loss_fn, static_argnums=3)

    totals, _, measures = loss(params, batch, keys, True)
    evaluated = loss(params, batch, keys, False)

    without = jax.jit(plain.loss_fn, static_argnums=3)(params, batch, keys, True)
    for one, two in zip(evaluated, without, strict=True):
        np.testing.assert_array_equal(one, two)
    added = 0.3 * measures["load_balancing_loss"]
    np.testing.assert_allclose(totals, without[0] + added, rtol=1e-6)


def test_labels_are_smoothed_in_training_alone(tokenizer):
    torch = pytest.importorskip("torch", reason="pip install torch==2.13.0 (extra: reference)")
    recipe = built(tokenizer)
    batch = recipe.collate_fn([example([5, 6, 7], [8, 9, 1]), example([5], [1])])
    params, keys = draw_like(recipe.abstract_params()), jax.random.split(jax.random.key(1), 2)
    module = find_model("gpt2")
    config = module.Config().updated(recipe.model["config"])
    logits = jax.jit(module.apply, static_argnums=0)(config, params, batch["input_ids"])
    loss_fn = jax.jit(recipe.loss_in_chunks("auto", label_smoothing=0.2), static_argnums=3)

    def mean(is_training):
        totals, weights = loss_fn(params, batch, keys, is_training)
        return float(totals.sum() / weights.sum())

    for is_training, smoothing in ((True, 0.2), (False, 0.0)):
        expected = torch.nn.functional.cross_entropy(
            torch.tensor(np.asarray(logits)).flatten(0, 1),
            torch.tensor(batch["labels"]).flatten().long(),
            label_smoothing=smoothing,
        )
        assert mean(is_training) == pytest.approx(float(expected), rel=1e-6)

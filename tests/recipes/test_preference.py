"""The preference recipe: rows of a prompt and two answers, the losses of the papers, bad rows."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from redco_flow.engine.deployer import Deployer
from redco_flow.models.find import find_model
from redco_flow.recipes.find import find_recipe
from redco_flow.recipes.preference import Settings, encode_row
from redco_flow.recipes.preference.config import Loss
from redco_flow.recipes.preference.losses import PairScores, pair_losses
from redco_flow.recipes.recipe import Generation, TokenLengths
from redco_flow.stages.preprocess.tokenizer import save_tokenizer, train_tokenizer
from redco_flow.text.tokenizer import TextTokenizer
from tests.drawn_params import draw_like

ROWS = [
    {"prompt": "one two", "chosen": "three", "rejected": "four five six seven"},
    {"prompt": "a longer prompt of some words", "chosen": "a longer answer", "rejected": "no"},
    {"prompt": "b", "chosen": "c d", "rejected": "d c"},
    {"prompt": "of some words", "chosen": "seven six", "rejected": "prompt"},
]  # fmt: skip
REFERENCE = np.array([[-11.0, -19.5], [-31.25, -9.0], [-12.0, -12.5], [-14.0, -8.0]], np.float32)
LOSSES = [
    {"type": "dpo"},
    {"type": "dpo", "beta": 0.3, "label_smoothing": 0.2},
    {"type": "dpo", "beta": 0.3, "variant": "hinge"},
    {"type": "dpo", "beta": 0.3, "variant": "robust", "label_smoothing": 0.2},
    {"type": "ipo", "beta": 0.5},
    {"type": "orpo", "beta": 0.7},
    {"type": "simpo"},
    {"type": "simpo", "beta": 1.5, "gamma": 0.2, "label_smoothing": 0.1},
]
IGNORED = -100
TINY = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}


def import_torch():
    """The reference; who has none skips the tests that compare with it."""
    return pytest.importorskip("torch", reason="pip install torch==2.13.0 (extra: reference)")


def torch_losses(loss, logps, counts, reference):
    """The papers' formulas, in float64; of logps (B, 2) summed over tokens."""
    torch = import_torch()
    beta, share = (
        loss.get("beta", 2.0 if loss["type"] == "simpo" else 0.1),
        loss.get("label_smoothing", 0.0),
    )
    means = logps / counts
    if loss["type"] == "orpo":
        odds = torch.exp(means) / (1 - torch.exp(means))
        ratio = torch.log(odds[:, 0] / odds[:, 1])
        return -means[:, 0] - beta * torch.log(torch.sigmoid(ratio))
    if loss["type"] == "simpo":
        inner = beta * means[:, 0] - beta * means[:, 1] - loss.get("gamma", 0.5)
    elif loss["type"] == "ipo":
        ratios = (logps - reference) / counts
        return (ratios[:, 0] - ratios[:, 1] - 1 / (2 * beta)) ** 2
    else:
        inner = beta * ((logps - reference)[:, 0] - (logps - reference)[:, 1])
    if loss.get("variant") == "hinge":
        return torch.clamp(1 - inner, min=0)
    right, wrong = torch.log(torch.sigmoid(inner)), torch.log(torch.sigmoid(-inner))
    if loss.get("variant") == "robust":
        return (-(1 - share) * right + share * wrong) / (1 - 2 * share)
    return -(1 - share) * right - share * wrong


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    texts = [text for row in ROWS for text in row.values()]
    save_tokenizer(train_tokenizer(texts, 280, "bpe"), folder)
    return TextTokenizer.load(folder)


@pytest.fixture(scope="module")
def published(tokenizer, tmp_path_factory):
    """A tiny GPT-2 of transformers, and its directory."""
    torch = import_torch()
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=280, n_embd=16, n_layer=1, n_head=2, n_positions=64, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=1, initializer_range=0.2,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).double()
    folder = tmp_path_factory.mktemp("gpt2")
    model.float().save_pretrained(folder)
    return model.double(), folder


def encoded(tokenizer, row):
    ids = encode_row(row, tokenizer, Settings(), source_prefix="", source_suffix=" :")
    return {"row_id": "x:1", **{name: np.array(one, np.int32) for name, one in ids.items()}}


def examples(tokenizer, *, with_reference=True):
    rows = [encoded(tokenizer, row) for row in ROWS]
    for row, (chosen, rejected) in zip(rows, REFERENCE, strict=True):
        if with_reference:
            row |= {"reference_chosen": float(chosen), "reference_rejected": float(rejected)}
    return rows


def built(tokenizer, model, loss):
    texts = TokenLengths(tokenizer, 20, 24)
    return find_recipe("preference").make({**model, "settings": {"loss": loss}}, texts)


def torch_scores(model, rows):
    """Summed log-probabilities of both answers, and their numbers of tokens, one text at a time."""
    torch = import_torch()
    logps, counts = [], []
    for row in rows:
        for name in ("chosen_ids", "rejected_ids"):
            prompt, answer = (torch.tensor(np.array(row[key])) for key in ("source_ids", name))
            ids = torch.cat([prompt, answer]).long()
            logits = model(ids[None]).logits[0, len(prompt) - 1 : -1]
            picked = torch.gather(
                torch.nn.functional.log_softmax(logits, -1), 1, answer.long()[:, None]
            )
            logps.append(picked.sum())
            counts.append(len(answer))
    return torch.stack(logps).reshape(-1, 2), torch.tensor(counts).reshape(-1, 2)


@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_losses_are_the_papers(loss):
    torch = import_torch()
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 9, (6, 2))
    logps = -rng.uniform(0.2, 3.0, (6, 2)) * counts
    reference = -rng.uniform(0.2, 3.0, (6, 2)) * counts

    scores = PairScores(*map(jnp.asarray, (logps, counts, reference)))
    found = pair_losses(Loss(**loss), scores)

    expected = torch_losses(loss, *map(torch.tensor, (logps, counts, reference)))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_losses_and_gradients_are_those_of_torch_over_model_shards(tokenizer, published, tmp_path):
    """Engine case 63: pairs of unequal lengths, each type, label smoothing included; 1e-5."""
    torch = import_torch()
    reference, folder = published
    rows = examples(tokenizer)
    scores = torch_scores(reference, rows)
    wanted = torch.tensor(REFERENCE, dtype=torch.float64)
    asked = [LOSSES[number] for number in (1, 4, 5, 7)]
    expected = [torch_losses(loss, *scores, wanted) for loss in asked]
    recipes = [built(tokenizer, {"name_or_path": str(folder)}, loss) for loss in asked]
    batch, shapes = recipes[0].collate_fn(rows), recipes[0].abstract_params()
    deployer = Deployer(2, devices=jax.devices()[:2], matmul_precision="highest")
    rules = deployer.get_sharding_rules(shapes, recipes[0].loss_fn, batch, None, False)
    params = recipes[0].load_params(deployer.params_sharding(shapes, rules))

    def mean_loss(params, recipe):
        losses, weights, _ = recipe.loss_fn(params, batch, None, False)
        return jnp.sum(losses) / jnp.sum(weights), losses

    differentiate = jax.value_and_grad(mean_loss, has_aux=True)
    found = deployer.jit(lambda params: [differentiate(params, one) for one in recipes])(params)

    parameters = dict(reference.named_parameters())
    for number, (loss, wanted) in enumerate(zip(asked, expected, strict=True)):
        (_, losses), gradient = found[number]
        np.testing.assert_allclose(losses, wanted.detach(), rtol=1e-5, atol=1e-5)
        recipes[0].save_pretrained(gradient, tmp_path / str(number))
        tensors = load_file(tmp_path / str(number) / "model.safetensors")
        assert tensors.keys() == parameters.keys()
        of_torch = torch.autograd.grad(wanted.mean(), list(parameters.values()), retain_graph=True)
        for name, one in zip(parameters, of_torch, strict=True):
            message = f"{loss}: {name}"
            np.testing.assert_allclose(tensors[name], one, rtol=1e-5, atol=1e-5, err_msg=message)


@pytest.mark.slow
def test_a_step_tells_rewards_margins_and_how_many_pairs_are_right(tokenizer):
    """By hand: the reference's log-probabilities are all there is of the model's, and 1 or -1."""
    recipe = built(tokenizer, {"config": TINY}, {"beta": 0.5})
    params = draw_like(recipe.abstract_params())
    rows = examples(tokenizer, with_reference=False)
    found = jax.jit(recipe.make_pred_fn(Generation(0)))(params, recipe.collate_fn(rows), None)
    away = [(1.0, -1.0), (-1.0, 1.0), (3.0, 1.0), (0.0, 1.0)]
    for index, (row, (chosen, rejected)) in enumerate(zip(rows, away, strict=True)):
        row["reference_chosen"] = float(found["chosen_log_likelihood"][index]) - chosen
        row["reference_rejected"] = float(found["rejected_log_likelihood"][index]) - rejected

    loss = jax.jit(recipe.loss_fn, static_argnums=3)
    _, weights, measures = loss(params, recipe.collate_fn(rows), None, False)

    assert weights.tolist() == [1, 1, 1, 1]
    assert measures["rewards/accuracies"].tolist() == [True, False, True, False]
    for name, values in zip(("chosen", "rejected"), np.transpose(away), strict=True):
        np.testing.assert_allclose(measures[f"rewards/{name}"], 0.5 * values, atol=1e-4)
        np.testing.assert_allclose(measures[f"logps/{name}"], found[f"{name}_log_likelihood"])
    np.testing.assert_allclose(measures["rewards/margins"], [1, -1, 1, -0.5], atol=1e-4)


def test_a_mixture_is_trained_on_the_load_balancing_loss_of_both_answers(tokenizer):
    """transformers' of each row alone, which TRL too adds to a preference loss.

    TRL 1.16 does so even where `output_router_logits` is false; we do not, as transformers.
    """
    torch = import_torch()
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 4}
    asked = {"output_router_logits": True, "router_aux_loss_coef": 0.3}
    recipe = built(tokenizer, {"family": "mixtral", "config": {**sizes, **asked}}, {"type": "ipo"})
    params = draw_like(recipe.abstract_params())
    batch = recipe.collate_fn(examples(tokenizer)[:2])
    keys = jax.random.split(jax.random.key(0), 2)
    loss = jax.jit(recipe.loss_fn, static_argnums=3)

    (trained, _, measures), (evaluated, *_) = (
        loss(params, batch, keys, one) for one in (True, False)
    )

    family = find_model("mixtral")
    config = family.Config().updated(recipe.model["config"])
    rows = batch["input_ids"].reshape(4, -1)
    _, of_layers = jax.jit(partial(family.apply_with_router, config))(params, rows)
    expected = []
    for row, labels in enumerate(batch["labels"].reshape(4, -1)):
        length = 1 + np.flatnonzero(labels != IGNORED)[-1]
        gates = [torch.tensor(np.asarray(one[row, :length])) for one in of_layers]
        expected.append(load_balancing_loss_func(tuple(gates), 4, 2).item())
    pairs = np.mean(np.reshape(expected, (2, 2)), axis=1)
    np.testing.assert_allclose(measures["load_balancing_loss"], pairs, rtol=1e-5)
    np.testing.assert_allclose(trained - evaluated, 0.3 * pairs, rtol=1e-4)


def test_both_answers_are_rows_of_language_modeling_in_one_batch(tokenizer):
    recipe = built(tokenizer, {"config": TINY}, {})
    language = find_recipe("language_modeling").make(
        {"config": TINY}, TokenLengths(tokenizer, 20, 24)
    )
    rows = examples(tokenizer)

    batch = recipe.collate_fn(rows)

    for index, name in enumerate(("chosen_ids", "rejected_ids")):
        alone = language.collate_fn([row | {"target_ids": row[name]} for row in rows])
        for key in ("input_ids", "labels"):
            np.testing.assert_array_equal(batch[key][:, index], alone[key])
    np.testing.assert_array_equal(batch["reference"], REFERENCE)


def test_the_width_that_a_pair_is_said_to_need_is_that_of_its_longer_answer(tokenizer):
    recipe = built(tokenizer, {"config": TINY}, {})
    rows = examples(tokenizer)

    widths = recipe.widths_of(lambda name: np.array([len(row[name]) for row in rows]))

    for row, (width,) in zip(rows, widths, strict=True):
        labels = recipe.collate_to([width])([row])["labels"]
        assert labels.shape == (1, 2, width)
        assert (labels[..., -1] != IGNORED).any()


@pytest.mark.slow
def test_predictions_are_log_likelihoods_and_rewards_where_they_can_be_told(tokenizer, published):
    reference, folder = published
    model, rows = {"name_or_path": str(folder)}, examples(tokenizer, with_reference=False)
    expected, counts = (one.detach().numpy() for one in torch_scores(reference, rows))

    def predicted(loss, rows):
        recipe = built(tokenizer, model, loss)
        batch = recipe.collate_fn(rows)
        params = recipe.load_params(None)
        return recipe.output_fn(jax.jit(recipe.make_pred_fn(Generation(0)))(params, batch, None))

    alone, compared = predicted({}, rows), predicted({}, examples(tokenizer))
    simpo = predicted({"type": "simpo"}, rows)

    assert set(alone[0]) == {"chosen_log_likelihood", "rejected_log_likelihood"}
    for index, name in enumerate(("chosen", "rejected")):
        for found in (alone, compared):
            logps = [row[f"{name}_log_likelihood"] for row in found]
            np.testing.assert_allclose(logps, expected[:, index], rtol=1e-5)
        rewards = [row[f"{name}_reward"] for row in compared]
        wanted = 0.1 * (expected - REFERENCE)[:, index]
        np.testing.assert_allclose(rewards, wanted, rtol=1e-4, atol=1e-5)
        means = [row[f"{name}_reward"] for row in simpo]
        np.testing.assert_allclose(means, 2 * (expected / counts)[:, index], rtol=1e-5)


def test_there_is_no_dropout_unless_the_pipeline_says_so(tokenizer):
    by_default, asked = (
        built(tokenizer, {"config": {"n_embd": 16, "n_layer": 1, "n_head": 2} | more}, {})
        for more in ({}, {"dropout_rate": 0.1})
    )

    rates = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
    assert {by_default.model["config"][name] for name in rates} == {0.0}
    assert {asked.model["config"][name] for name in rates} == {0.1}


def test_a_recipe_is_made_again_from_what_its_checkpoint_says(tokenizer):
    recipe = built(tokenizer, {"config": TINY}, {"type": "ipo", "beta": 0.3})

    again = find_recipe("preference").make(recipe.model, TokenLengths(tokenizer, 20, 24))

    assert again.model == recipe.model
    assert again.model["settings"]["loss"]["beta"] == 0.3

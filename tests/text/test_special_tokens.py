"""Start and end tokens are there once, whether or not a text brings its own; which end is cut."""

import json

import numpy as np
import pytest
from tokenizers import AddedToken, processors
from transformers import AutoTokenizer, BertTokenizer

from redco_flow.recipes.classification import encode as encode_labelled
from redco_flow.recipes.language_modeling import build, encode, encode_texts
from redco_flow.recipes.preference import encode_row
from redco_flow.recipes.preference.config import Settings
from redco_flow.recipes.text_to_text import encode as encode_to_text
from redco_flow.stages.preprocess.tokenizer import save_tokenizer, train_tokenizer
from redco_flow.text.special_tokens import with_start
from redco_flow.text.tokenizer import TextTokenizer

LENGTHS = {
    "source_prefix": "",
    "source_suffix": "",
    "max_source_length": 64,
    "max_target_length": 64,
}
TINY = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 128}
BARE, OWN = ("[INST] a [/INST]", " c"), ("<s>[INST] a [/INST]", " c</s>")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tokenizer whose own template begins every text with a token, as LLaMA's does."""
    folder = tmp_path_factory.mktemp("llama")
    backend = train_tokenizer(["a few words [INST] b [/INST] c"] * 9, 300, "bpe")
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    start = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", start)]
    )
    save_tokenizer(backend, folder, split_special_tokens=False, bos_token="<s>")
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder):
    return TextTokenizer.load(folder)


@pytest.fixture(scope="module")
def reference(folder):
    return AutoTokenizer.from_pretrained(folder)


def row(tokenizer, pair):
    """What a model reads of a prompt and its target, and what it is given to generate."""
    ids = encode([pair[0]], [pair[1]], tokenizer, **LENGTHS)
    (source,), (target,) = ids.source_ids, ids.target_ids
    example = {"row_id": "x:1", "source_ids": np.array(source), "target_ids": np.array(target)}
    recipe = build({"config": TINY}, tokenizer, source_length=32, target_length=32)
    batch, prompts = recipe.collate_fn([example]), recipe.collate_prompts([example])
    num_read = len(source) + len(target)
    asked = prompts["input_ids"][0][prompts["attention_mask"][0] == 1]
    return [*batch["input_ids"][0][:num_read], target[-1]], asked.tolist(), dict(ids.counts)


def test_a_prompt_and_a_target_with_their_own_special_tokens_are_encoded_once(tokenizer, reference):
    """Oracle: transformers' ids of the whole text, to which it adds nothing."""
    text = "".join(OWN)
    expected = reference(text, add_special_tokens=False)["input_ids"]

    ids, asked, counts = row(tokenizer, OWN)

    assert ids == expected
    assert asked == reference(OWN[0], add_special_tokens=False)["input_ids"]
    assert counts == {"own_starts": 1, "own_ends": 1}
    assert row(tokenizer, BARE) == (ids, asked, {})


def test_plain_texts_have_them_once(tokenizer, reference):
    own = encode_texts(["<s>a b c</s>", "a b c"], tokenizer, max_length=64)

    expected = reference("a b c</s>", add_special_tokens=False)["input_ids"]
    assert [ids.tolist() for ids in own.target_ids] == [expected, expected]
    assert own.counts == {"own_starts": 1, "own_ends": 1}


def test_both_sides_of_an_encoder_decoder_are_in_the_tokenizers_template(folder, tmp_path):
    """Oracle: transformers' ids by the template of BART, with which its models are finetuned."""
    start, end = (("<s>", 275), ("</s>", 1))
    reference = AutoTokenizer.from_pretrained(folder)
    reference.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B", special_tokens=[start, end]
    )
    reference.save_pretrained(tmp_path)
    tokenizer = TextTokenizer.load(tmp_path)
    texts, settings = ["a b c a b c", "c"], LENGTHS | {"max_source_length": 5}
    expected = reference(texts, truncation=True, max_length=5)["input_ids"]

    own, bare = (
        encode_to_text(sources, texts, tokenizer, **settings)
        for sources in ([f"<s>{text}</s>" for text in texts], texts)
    )

    assert (expected[1][0], expected[1][-1]) == (275, 1)
    assert list(own.source_ids) == list(bare.source_ids) == expected
    assert list(bare.target_ids) == reference(texts)["input_ids"]
    assert (bare.is_source_cut, bare.counts) == ([True, False], {})
    assert own.counts == {"own_starts": 2, "own_ends": 2}


def test_a_tokenizer_of_bert_ends_texts_with_its_separator(tmp_path):
    """BERT's tokenizers name no end token. Oracle: the ids of transformers."""
    words = {word: number for number, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a"])}
    BertTokenizer(vocab=words).save_pretrained(tmp_path)
    assert "eos_token" not in json.loads((tmp_path / "tokenizer_config.json").read_text())

    tokenizer = TextTokenizer.load(tmp_path)

    assert (tokenizer.pad_id, tokenizer.eos_id) == (0, 3)
    found = encode_labelled(["a a"], [], tokenizer, **LENGTHS)
    expected = AutoTokenizer.from_pretrained(tmp_path)("a a")["input_ids"]
    assert list(found.source_ids) == [expected] == [[2, 4, 4, 3]]


def test_texts_with_labels_have_them_once(tokenizer):
    own, bare = (encode_labelled([text], [], tokenizer, **LENGTHS) for text in ("<s>a b", "a b"))

    assert list(own.source_ids) == list(bare.source_ids)
    assert (own.counts, bare.counts) == ({"own_starts": 1}, {})


def test_preferences_have_them_once(tokenizer):
    settings, around = Settings(), {"source_prefix": "", "source_suffix": ""}
    rows = [
        {"prompt": prompt, "chosen": answer, "rejected": f"a{answer}"}
        for prompt, answer in (BARE, OWN)
    ]

    bare, own = (encode_row(one, tokenizer, settings, **around) for one in rows)

    assert {name: list(ids) for name, ids in own.items()} == {
        name: list(ids) for name, ids in bare.items()
    }


@pytest.mark.parametrize("ids", [[], [7], [9], [9, 7], [9, 9]])
def test_what_already_begins_so_gets_no_second_start(ids):
    assert with_start(ids, (9,)) == (ids if ids[:1] == [9] else [9, *ids])
    assert with_start(ids, ()) == ids


SOURCE = "a b c a b c a b c"


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("encode_pairs", [encode, encode_to_text])
def test_the_chosen_end_of_a_source_is_cut_and_its_suffix_is_kept(
    tokenizer, reference, encode_pairs, side
):
    """Oracle: transformers' truncation of the same text."""
    is_to_text = encode_pairs is encode_to_text
    start = [*tokenizer.prefix_ids] * is_to_text
    ending = tokenizer.encode_suffix(" c?") + [tokenizer.eos_id] * is_to_text
    length = 3 + len(start) + len(ending)
    settings = LENGTHS | {"source_suffix": " c?", "max_source_length": length}
    reference.truncation_side = side
    kept = reference(SOURCE, add_special_tokens=False, truncation=True, max_length=3)["input_ids"]

    found = encode_pairs([SOURCE], ["c"], tokenizer, **settings, truncation_side=side)

    assert list(found.source_ids) == [start + kept + ending]
    assert found.is_source_cut == [True]


@pytest.mark.parametrize("side", ["right", "left"])
def test_the_chosen_end_of_a_text_with_a_label_is_cut(tokenizer, reference, side):
    reference.truncation_side = side
    kept = reference(SOURCE, truncation=True, max_length=4)["input_ids"]

    settings = LENGTHS | {"max_source_length": 4}
    found = encode_labelled([SOURCE], [], tokenizer, **settings, truncation_side=side)

    assert list(found.source_ids) == [kept]

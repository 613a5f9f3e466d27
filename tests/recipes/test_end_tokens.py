import json

import numpy as np

from redco_flow.recipes.find import find_recipe
from redco_flow.recipes.parts.model import end_ids
from redco_flow.text.tokenizer import TextTokenizer
from tests.models.conftest import DECODERS
from tests.text.chat_tokenizers import make_tokenizer


def test_texts_are_cut_at_every_end_token_of_the_model(tmp_path):
    """The second end token is no special token here, so decoding alone would leave it in."""
    make_tokenizer("", eos="</s>").save_pretrained(tmp_path / "tokenizer")
    tokenizer = TextTokenizer.load(tmp_path / "tokenizer")
    text, (end, *_) = tokenizer.encode_batch(["the tool", "Brief"])
    _, values = DECODERS["llama3"]
    config = {**values, "vocab_size": 504, "eos_token_id": [tokenizer.eos_id, end]}
    model = {"family": "llama", "config": config}
    recipe = find_recipe("language_modeling").build(
        model, tokenizer, source_length=4, target_length=4
    )

    found = recipe.output_fn(np.array([[*text, end, *text], [*text, tokenizer.eos_id, *text]]))

    assert found == ["the tool", "the tool"]
    assert end_ids(json.loads(json.dumps(recipe.model))) == (tokenizer.eos_id, end)

"""Both halves of a published model's configuration are read: generation_config.json, too."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from redco_flow.engine.files import UnreadableFile
from redco_flow.models.find import find_model
from redco_flow.models.generation.generate import generate
from redco_flow.models.hub.pretrained import load_pretrained, read_model
from tests.models.conftest import BARTS, DECODERS

ENDS = [1, 0, 17, 27]
NUM_NEW_TOKENS = 16


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Gemma 2's two files, as published: config.json names one end token of several."""
    _, values = DECODERS["gemma2"]
    values = {**values, "model_type": "gemma2", "eos_token_id": 1}
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ENDS}))
    return tmp_path


def test_end_tokens_are_those_of_both_files_unless_they_are_given(folder):
    _, both = read_model(folder)
    _, given = read_model(folder, overrides={"eos_token_id": 5})

    assert both.eos_token_ids == tuple(ENDS)
    assert given.eos_token_ids == (5,)


def test_forced_and_first_tokens_are_those_of_the_generation_configuration(tmp_path):
    family, values = BARTS["bart"]
    (tmp_path / "config.json").write_text(json.dumps({**values, "model_type": family}))
    tokens = {"forced_bos_token_id": 7, "forced_eos_token_id": 9, "decoder_start_token_id": 11}
    (tmp_path / "generation_config.json").write_text(json.dumps(tokens))

    _, config = read_model(tmp_path)

    assert {key: getattr(config, key) for key in tokens} == tokens


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        ("[1]", UnreadableFile, "generation_config.json: not a generation configuration: a list"),
        ("{", UnreadableFile, "generation_config.json"),
        ('{"eos_token_id": "x"}', UnreadableFile, "eos_token_id is 'x'; it must be a token id"),
        ('{"eos_token_id": [1, 99]}', UnreadableFile, r"eos_token_id is 99; it must be in \[0, 61"),
    ],
)
def test_a_generation_configuration_that_cannot_be_is_refused(folder, content, error, message):
    (folder / "generation_config.json").write_text(content)

    with pytest.raises(error, match=message):
        read_model(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "values", "of_generation"),
    [
        ("gemma2", DECODERS["gemma2"][1], {"eos_token_id": ENDS}),
        ("bart", BARTS["bart"][1], {"forced_bos_token_id": 7, "forced_eos_token_id": 9,
                                    "decoder_start_token_id": 11, "eos_token_id": ENDS}),
    ],
)  # fmt: skip
def test_greedy_texts_are_those_of_transformers_from_the_same_files(
    family, values, of_generation, tmp_path
):
    torch = pytest.importorskip("torch", reason="pip install torch==2.13.0 (extra: reference)")
    import transformers

    config = transformers.CONFIG_MAPPING[family].from_dict(dict(values))
    name = find_model(family).Config.architecture
    torch.manual_seed(1)
    model = getattr(transformers, name)(config).eval()
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    model.generation_config.update(**of_generation)
    model.save_pretrained(tmp_path)
    ids = np.random.default_rng(3).integers(3, 61, (16, 6))

    expected = getattr(transformers, name).from_pretrained(tmp_path).generate(
        torch.from_numpy(ids), max_new_tokens=NUM_NEW_TOKENS, do_sample=False
    )  # fmt: skip
    module, own = read_model(tmp_path)
    params = load_pretrained(tmp_path, module, own)
    run = jax.jit(partial(generate, module, own, max_new_tokens=NUM_NEW_TOKENS))
    found = run(params, ids, np.ones_like(ids)).tokens

    begins = ids.shape[1] if family == "gemma2" else 1
    rows = _texts(found)
    assert rows == _texts(expected[:, begins:])
    assert {row[-1] for row in rows} & {0, 17, 27}, "some texts end by this file alone"


def _texts(tokens: Any) -> list[list[int]]:
    """Cut rows behind their first end token, as transformers' generation does."""
    cut = []
    for row in np.asarray(tokens).tolist():
        end = next((place for place, token in enumerate(row) if token in ENDS), len(row))
        cut.append(row[: end + 1])
    return cut

"""The check of an export: what transformers draws and never uses is not missing."""

from dataclasses import asdict

import jax
import pytest

from redco_flow.models.find import find_model
from redco_flow.models.hub.tensors import save_params
from redco_flow.records import write_json
from redco_flow.stages.artifacts.export_check import Exported, check_export
from redco_flow.stages.artifacts.recorded_model import find_recorded_model
from tests.drawn_params import draw_params
from tests.models.conftest import CAPTIONERS

pytestmark = pytest.mark.slow


def test_a_captioner_exports_although_transformers_has_a_pooler_beside_it(tmp_path):
    pytest.importorskip("torch", reason="pip install torch==2.13.0 (extra: reference)")
    family, values = CAPTIONERS["vision_encoder_decoder"]
    module = find_model(family)
    model = find_recorded_model(
        "", {"family": family, "config": asdict(module.Config.from_hugging_face(values))}
    )
    params = jax.device_get(draw_params(module, model.config))
    save_params(tmp_path, model.layouts, params)
    write_json(tmp_path / "config.json", model.config.to_hugging_face())

    found = check_export(Exported(tmp_path, model, params))

    assert found.reader.startswith("transformers ")
    assert found.difference < 1e-5

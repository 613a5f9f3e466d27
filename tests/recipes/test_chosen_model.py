import pytest

from redco_flow.models.find import find_model
from redco_flow.recipes.parts.model import ChosenModel
from tests.models.conftest import DECODERS


@pytest.mark.parametrize(
    ("asked", "recorded"), [("splash", "auto"), ("triton", "auto"), ("xla", "xla")]
)
def test_a_checkpoint_asks_for_no_kernel_of_the_devices_that_trained_it(asked, recorded):
    module = find_model("llama")
    config = module.Config.from_hugging_face(DECODERS["llama3"][1])

    model = ChosenModel("llama", module, config.updated({"attention": asked}), None)

    assert model.record["config"]["attention"] == recorded

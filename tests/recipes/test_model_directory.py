import pytest

from redco_flow.recipes.parts.model import find_checkpoint


def test_a_directory_is_a_model_when_it_has_a_config(tmp_path):
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "t5"}')
    assert find_checkpoint(str(tmp_path)) == tmp_path

    config.unlink()
    with pytest.raises(ValueError, match=r"has no config\.json"):
        find_checkpoint(str(tmp_path))


def test_a_path_that_does_not_exist_is_not_looked_up_on_the_hub(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        find_checkpoint(str(tmp_path / "nowhere"))


def test_a_model_that_the_hub_does_not_give_is_named():
    with pytest.raises(
        ValueError, match="model 'nobody/no-such-model' at main is not in the cache"
    ):
        find_checkpoint("nobody/no-such-model")

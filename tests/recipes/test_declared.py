"""What a recipe's module declares, read once."""

import sys
from types import ModuleType

import pytest

from redco_flow.models.find import FAMILIES
from redco_flow.recipes.declared import FunctionRecipe, RowRecipe, TextRecipe
from redco_flow.recipes.find import family_problem, find_own_recipe, find_recipe

FUNCTIONS = {
    "init_params": lambda key: {},
    "collate_fn": lambda examples: {},
    "loss_fn": lambda params, batch, rngs, is_training: 0.0,
    "pred_fn": lambda params, batch, rngs: [],
}


@pytest.fixture
def declared(monkeypatch):
    """Return what reads a user's module that has these names."""

    def read(**names):
        module = ModuleType("a_users_recipe")
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, "a_users_recipe", module)
        return find_recipe("python:a_users_recipe")

    return read


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("text_to_text", TextRecipe),
        ("language_modeling", TextRecipe),
        ("chat", TextRecipe),
        ("classification", TextRecipe),
        ("regression", TextRecipe),
        ("drill", TextRecipe),
        ("image_classification", RowRecipe),
        ("image_to_text", RowRecipe),
        ("preference", RowRecipe),
        ("text_to_image", FunctionRecipe),
    ],
)
def test_a_recipe_of_the_package_is_of_its_kind(name, kind):
    recipe = find_recipe(name)

    assert type(recipe) is kind
    assert (find_own_recipe(name) is recipe) == (kind is not FunctionRecipe)


def test_a_users_module_of_functions_brings_its_own_model(declared):
    recipe = declared(**FUNCTIONS)

    assert isinstance(recipe, FunctionRecipe)
    assert recipe.has_own_model
    assert (recipe.columns, recipe.target) == (None, "label")
    assert (recipe.has_ids, recipe.has_tokenizer, recipe.makes_texts) == (False, False, False)


@pytest.mark.parametrize(
    ("names", "problem"),
    [
        ({"encode": len}, "lacks build"),
        ({"build": len}, "lacks encode"),
        ({**FUNCTIONS, "loss_fn": len}, "has a loss_fn that cannot be called with 4 arguments"),
        ({**FUNCTIONS, "COLUMNS": "image"}, "has COLUMNS that are no tuple of names: 'image'"),
        ({**FUNCTIONS, "COLUMNS": ("a",), "TARGET": "b"}, "has a TARGET that is none of its COLU"),
        ({**FUNCTIONS, "TARGETS": "words"}, "has TARGETS 'words'"),
        ({**FUNCTIONS, "COLUMNS": ("a",), "TARGETS": "numbers"}, "has TARGETS 'numbers' and no T"),
        ({**FUNCTIONS, "TARGETS": "classes"}, "has TARGETS 'classes', whose names its"),
    ],
)
def test_what_a_users_module_lacks_is_an_error_with_its_name(declared, names, problem):
    with pytest.raises(ValueError, match=rf"the recipe module 'python:a_users_recipe' {problem}"):
        declared(**names)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_advice_for_a_family_is_a_recipe_that_trains_it(family):
    names = ("text_to_text", "image_classification")
    advice = [family_problem(find_recipe(name), family) for name in names]

    (said,) = {one.rpartition("use recipe ")[2].rstrip(".") for one in advice if one}
    recipe = find_recipe(said)
    assert family in recipe.families
    assert recipe.same_model_as == said  # not one that trains another recipe's model

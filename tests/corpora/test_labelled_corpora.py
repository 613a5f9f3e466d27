"""The corpora with a label for each text: what they say of texts whose answer is known."""

import math

from redco_flow.corpora import character_names, library_names, statement_sizes, time_phrases


def test_names_of_characters_have_the_categories_of_the_unicode_standard():
    found = {row["name"]: row["category"] for row in character_names.rows([])}

    # Chapter 4 of the standard: Lu, Nd and Sm are upper-case letters, digits and operators.
    assert found["latin capital letter a with acute"] == "Lu"
    assert found["digit seven"] == "Nd"
    assert found["square root"] == "Sm"
    assert not [name for name in found if name.startswith(("hangul syllable", "cjk unified"))]


def test_the_same_is_said_in_every_language():
    found = {}
    for row in time_phrases.rows(time_phrases.files()):
        found.setdefault(row["language"], []).append(row["text"])

    assert set(found) == set(time_phrases.LANGUAGES)
    # The third part is an amount, whose digits are the same in these languages.
    amounts = [
        {text.rsplit("; ", 1)[1].split()[0] for text in found[code]} for code in ("es", "pl")
    ]
    assert amounts[0] == amounts[1]
    assert any("vor " in text and " und " in text for text in found["de"])
    assert any("前" in text for text in found["ja"])
    assert next(iter(time_phrases.rows(time_phrases.files())))["text"] == found["ar"][0]


def test_a_statement_with_more_parts_compiles_to_more_instructions(tmp_path):
    path = tmp_path / "module.py"
    path.write_text("a = b\na = b\na = b(c, d) + e[f]\n\ndef g():\n    yield a\n    h += 1\n")

    short, long, inner = statement_sizes.rows([path])

    assert (short["statement"], long["statement"]) == ("a = b", "a = b(c, d) + e[f]")
    assert inner["statement"] == "h += 1"
    # At least a load and a store; each of the other names is loaded, too.
    assert math.log2(2) <= short["log2_instructions"]
    assert short["log2_instructions"] + 1 < long["log2_instructions"]


def test_the_statements_are_those_of_modules_and_not_of_packages():
    assert statement_sizes.files()
    assert {path.parent for path in statement_sizes.files()} == {statement_sizes.files()[0].parent}


def test_conversations_ask_for_each_definition_once_and_answer_with_its_kind(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        "LIMIT = 3\n\nclass Wrong(ValueError):\n    pass\n\n"
        "class Point:\n    @property\n    def norm(self): ...\n    def move(self): ...\n\n"
        "def f(): ...\n"
    )

    first, second = library_names.rows([path])

    told = [turn["content"] for turn in first["messages"] + second["messages"]]
    assert told[1:7] == [
        *("In module, what is LIMIT?", "A constant."),
        *("And Wrong?", "An exception."),
        *("And Point?", "A class."),
    ]
    assert told[8:] == [
        *("In module, what is Point.norm?", "A property."),
        *("And Point.move?", "A method."),
        *("And f?", "A function."),
    ]

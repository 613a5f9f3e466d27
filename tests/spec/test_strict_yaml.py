"""The YAML reader: what it takes, what it refuses, and that nothing else ever happens."""

from __future__ import annotations

import time

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from redco_flow.errors import ConfigError
from redco_flow.spec.document import Origin
from redco_flow.spec.yaml import (
    MAX_BYTES,
    MAX_LEVELS,
    MAX_NODES,
    parse_file,
    parse_yaml,
    read_yaml,
    write_yaml,
)


def mistakes(text: str) -> list[str]:
    """Return "line:column: message" of everything wrong with a text."""
    _, problems = parse_yaml(text, "f.yaml")
    return [str(problem).removeprefix("f.yaml:") for problem in sorted(problems)]


def value(text: str):
    return read_yaml(f"key: {text}", "f.yaml").values["key"]


@pytest.mark.parametrize("text", ["1e-4", "1.0e-4", "1E-4", "0.0001", "+1e-4"])
def test_a_number_with_an_exponent_is_a_float(text):
    """Engine case 1: the value is a number, however it is written."""
    assert value(text) == 1e-4
    assert isinstance(value(text), float)


@pytest.mark.parametrize(
    "text",
    [
        "no",
        "yes",
        "on",
        "off",
        "No",
        "ON",
        "y",
        "n",
        "1:30",
        "12:30:00",
        "010",
        "0o8",
        "1_000",
        "2024-01-01",
        "=",
        "0b11",
        "00",
        "1e",
        "e5",
        "0x",
        "1.2.3",
        "infinity",
        "nan",
    ],
)
def test_a_text_that_older_yaml_takes_for_something_else_is_that_text(text):
    """Engine case 5: the value is that text, or is refused."""
    assert value(text) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("0", 0),
        ("-7", -7),
        ("0x1F", 31),
        ("0o17", 15),
        ("1.", 1.0),
        (".5", 0.5),
        ("'1e-4'", "1e-4"),
        ('"no"', "no"),
        ("[1, [a, {b: 2}]]", [1, ["a", {"b": 2}]]),
    ],
)
def test_a_scalar_means_what_yaml_1_2_says(text, expected):
    assert value(text) == expected
    assert type(value(text)) is type(expected)


def test_a_key_is_text_whatever_it_looks_like():
    document = read_yaml("on: 1\n2: 2\nnull: 3\n1e-4: 4", "f.yaml")

    assert document.values == {"on": 1, "2": 2, "null": 3, "1e-4": 4}


def test_a_duplicate_key_is_refused_at_its_line():
    """Engine case 2: the error names its line."""
    assert mistakes("a: 1\nb:\n  c: 1\n  c: 2\na: 3") == [
        "4:3: duplicate key 'c'; the first is in line 3",
        "5:1: duplicate key 'a'; the first is in line 1",
    ]


def test_every_key_and_item_knows_its_line_and_column():
    document = read_yaml("a: 1\nb:\n  c: [x,\n      y]\n", "f.yaml")

    assert document.origin(("b", "c")) == Origin("f.yaml", 3, 3)
    assert document.origin(("b", "c", 1)) == Origin("f.yaml", 4, 7)
    assert document.origin(("b", "c", "unwritten")) == Origin("f.yaml", 3, 3)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("a: !!python/object/apply:os.system ['touch X']", "1:4"),
        ("a: !!python/name:os.system", "1:4"),
        ("a:\n  - !!str 5", "2:5"),
        ("a: !local {x: 1}", "1:4"),
        ("a: ! x", "1:4"),
    ],
)
def test_a_tag_is_refused_at_its_place(text, place):
    """Fault 28: tags, recursion, depth and size are refused."""
    (message,) = mistakes(text)

    assert message.startswith(f"{place}: tag ")


def test_a_recursive_alias_is_refused():
    """Fault 28: tags, recursion, depth and size are refused."""
    assert mistakes("a: &x\n  b: [1, *x]") == [
        "2:10: alias 'x' is recursive: it stands inside its own anchor"
    ]


@pytest.mark.parametrize(
    "text",
    [
        "[" * 3000,
        "[" * 3000 + "]" * 3000,
        "{a: " * 3000,
        "- " * 3000 + "x",
        "\n".join(" " * level + "a:" for level in range(1000)),
    ],
)
def test_three_thousand_levels_are_refused_at_once(text):
    """Fault 28: tags, recursion, depth and size are refused."""
    start = time.process_time()
    (message,) = mistakes(text)

    assert f"nested deeper than {MAX_LEVELS} levels" in message
    assert time.process_time() - start < 5  # of CPU time, so on a busy machine too


def test_levels_that_aliases_add_count_too():
    """Fault 28: tags, recursion, depth and size are refused."""
    deep = "[" * 40 + "x" + "]" * 40
    bottom = "[" * 40 + "*a" + "]" * 40

    assert "nested deeper" in mistakes(f"a: &a {deep}\nb: {bottom}")[0]


def test_an_alias_bomb_is_refused():
    """Fault 28: tags, recursion, depth and size are refused."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    for i in range(1, 9):
        lines.append(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]")

    (message,) = mistakes("\n".join(lines))

    assert f"aliases make more than {MAX_NODES:,} values" in message


def test_an_alias_stands_for_its_anchor():
    document = read_yaml("a: &x {b: [1, 2]}\nc: *x", "f.yaml")

    assert document.values == {"a": {"b": [1, 2]}, "c": {"b": [1, 2]}}


def test_too_many_values_are_refused():
    assert f"more than {MAX_NODES:,} values" in mistakes("- 1\n" * (MAX_NODES + 1))[0]


def test_a_file_over_one_mebibyte_is_refused(tmp_path):
    """Fault 28: tags, recursion, depth and size are refused."""
    path = tmp_path / "big.yaml"
    path.write_bytes(b"#" * (MAX_BYTES + 1))

    _, problems = parse_file(path)

    assert [problem.message for problem in problems] == [
        "is larger than 1 MiB, the limit for a configuration file"
    ]


@pytest.mark.parametrize("character", ["\x00", "\x07", "\x1b", "\x7f", "\x85", "\u202e", "\u2028"])
def test_a_control_character_is_refused_with_its_place(character):
    """Fault 30, shell words, quotes, line breaks in names and values: they are passed on as text
    and never interpreted; control characters are refused.
    """
    message = f"2:4: control character U+{ord(character):04X} is not allowed"

    assert mistakes(f"a: 1\nb: {character}x")[0] == message


@pytest.mark.parametrize("escape", [r"\0", r"\a", r"\e", r"\r", r"\ud800", r"\u202e", r"\uffff"])
def test_a_control_character_in_an_escape_is_refused(escape):
    """Fault 30, shell words, quotes, line breaks in names and values: they are passed on as text
    and never interpreted; control characters are refused.
    """
    (message,) = mistakes(f'a: "x{escape}"')

    assert message.startswith("1:4: control character U+")


def test_unicode_and_quotes_and_newlines_are_ordinary_text():
    """Fault 30, shell words, quotes, line breaks in names and values: they are passed on as text
    and never interpreted; control characters are refused.
    """
    text = "a: \"$(touch X) `touch X` 'Ä€ 😀'\\n\"\nb: |\n  one\n  two\n"

    document = read_yaml(text, "f.yaml")

    assert document.values == {"a": "$(touch X) `touch X` 'Ä€ 😀'\n", "b": "one\ntwo\n"}


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("<<: {a: 1}", "1:1: merge keys (<<) are not allowed"),
        ("? [a]\n: 1", "1:3: a key must be plain text"),
        ("a: 1\n---\nb: 2", "2:1: a second document begins here"),
        ("%YAML 1.1\n---\na: 1", "1:1: directives"),
        ("a: *x", "1:4: alias 'x' has no anchor before it"),
        ("a: &x 1\nb: &x 2", "2:4: anchor 'x' is defined twice"),
        ("'': 1", "1:1: a key is empty"),
        ("a: .inf", "1:4: .inf is not a finite number"),
        ("a: 1e999", "1:4: '1e999' is too large for a float"),
        ("a: 9223372036854775808", "1:4: '9223372036854775808' does not fit in 64 bits"),
        ("a: 1\n\tb: 2", "indent with spaces, not tabs"),
        ("a: {b: ${c}}", "put ${…} in quotes"),
        ("a: 'b", "is not YAML"),
        ('a: "\\UFFFFFFFF"', "1:7: is not YAML"),
        ("%YAML 1." + "9" * 5000 + "\n---\na: 1", "is not YAML"),
    ],
)
def test_what_the_reader_refuses_has_a_place_and_a_reason(text, part):
    assert part in "\n".join(mistakes(text))


def test_several_mistakes_are_told_at_once():
    assert len(mistakes("a: !!x 1\nb: .nan\nb: *z\nc: \x07")) == 5


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"a: \xff\xfe", "pipeline.yaml:1:4: is not UTF-8"),
        ("a: 1".encode("utf-16"), "pipeline.yaml:1:1: is not UTF-8"),
    ],
)
def test_a_file_that_is_not_utf_8_is_refused(tmp_path, content, reason):
    path = tmp_path / "pipeline.yaml"
    path.write_bytes(content)

    _, problems = parse_file(path)

    assert reason in str(problems[0])


def test_a_byte_order_mark_is_no_mistake(tmp_path):
    path = tmp_path / "pipeline.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\n")

    document, problems = parse_file(path)

    assert (document.values, problems) == ({"a": 1}, [])


@pytest.mark.parametrize("name", ["absent.yaml", "folder"])
def test_a_file_that_cannot_be_read_is_one_problem(tmp_path, name):
    (tmp_path / "folder").mkdir()

    _, problems = parse_file(tmp_path / name)

    assert [problem.source for problem in problems] == [str(tmp_path / name)]


_INDICATORS = st.text(alphabet="ab01-:?,[]{}#&*!|>'\"%@`~<=.\\$eExU \n\t\r\x00\u2028\ufeff")


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.text(), _INDICATORS))
def test_any_text_gives_values_or_a_configuration_error(text):
    try:
        document = read_yaml(text, "fuzz.yaml")
    except ConfigError:
        pass
    else:
        assert () in document.origins
        assert read_yaml(write_yaml(document.values), "again.yaml").values == document.values


@settings(max_examples=100, deadline=None)
@given(st.binary())
def test_any_bytes_in_a_file_give_values_or_problems(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_bytes(content)

    document, problems = parse_file(path)

    assert problems or () in document.origins


_PRINTABLE = st.text("ab01 :-#,[]{}&*!|>'\"%@`~.=\\äß漢😀é", max_size=12)
_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | _PRINTABLE
    | st.sampled_from(["1e-4", "no", "010", "0o17", "0x1F", "<<", "=", "1:30", "null", ".inf"]),
    lambda inner: st.lists(inner) | st.dictionaries(_PRINTABLE.filter(bool), inner),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(_VALUES)
def test_what_is_written_is_read_back_the_same(values):
    again = read_yaml(write_yaml(values), "written.yaml").values

    assert again == values
    assert repr(again) == repr(values)  # 1 is not 1.0, nor True


_TEXTS = st.recursive(
    _PRINTABLE,
    lambda inner: st.lists(inner) | st.dictionaries(_PRINTABLE.filter(bool), inner),
    max_leaves=12,
)


@settings(max_examples=60, deadline=None)
@given(_TEXTS, st.sampled_from([True, False, None]))
def test_structure_is_read_as_pyyaml_reads_it(values, flow_style):
    text = yaml.safe_dump(
        values, default_style='"', allow_unicode=True, default_flow_style=flow_style
    )

    ours = read_yaml(text, "reference.yaml").values

    assert ours == yaml.load(text, Loader=yaml.BaseLoader)

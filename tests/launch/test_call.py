from pathlib import Path

import pytest
from tiny_stages.calls import make_call, new_attempt

from redco_flow.errors import UsageError
from redco_flow.launch.call import read_call, write_call


def test_a_call_is_read_back_as_it_was_written(workspace):
    attempt = new_attempt(workspace)
    call = make_call(workspace, config={"text": 'Ünï "$(touch X)"\n\''})

    write_call(attempt, call)

    assert read_call(attempt.call_path) == call


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (Path("x"), r"config\.text\[0\]\.deep is a PosixPath"),
        (float("nan"), r"config\.text\[0\]\.deep is nan"),
        ({1: 2}, r"config\.text\[0\]\.deep: key 1 is a int"),
        (print, r"config\.text\[0\]\.deep is a builtin_function_or_method"),
    ],
)
def test_a_config_that_is_not_json_is_refused_by_place_and_leaves_no_file(workspace, value, said):
    """Fault 36, a result or a setting that is not data: it is refused when it is submitted or
    published; no file is left.
    """
    attempt = new_attempt(workspace)
    call = make_call(workspace)
    call.config["text"] = [{"deep": value}]

    with pytest.raises(UsageError, match=said):
        write_call(attempt, call)

    assert list(attempt.path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"protocol": 1}', '{"protocol": 1, "inputs": 3}'])
def test_what_is_no_call_is_refused_by_its_path(tmp_path, text):
    path = tmp_path / "call.json"
    path.write_text(text)

    with pytest.raises(UsageError, match=r"call\.json: not a call"):
        read_call(path)


def test_a_call_of_another_protocol_is_refused(tmp_path):
    path = tmp_path / "call.json"
    path.write_text('{"protocol": 9}')

    with pytest.raises(UsageError, match="protocol 9"):
        read_call(path)


def test_a_missing_call_is_named(tmp_path):
    with pytest.raises(UsageError, match="there is no call"):
        read_call(tmp_path / "call.json")

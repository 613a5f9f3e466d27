import pytest

from redco_flow.engine.files import canonical_json, digest_file, digest_json, read_json, write_json


def test_files_are_digested_by_blake3_and_values_by_sha256_of_sorted_json(tmp_path):
    """The digests are those of `b3sum` and of `printf '{"a":"é","b":[1]}' | sha256sum`."""
    (tmp_path / "empty").touch()
    (tmp_path / "abc").write_bytes(b"abc")
    value = {"b": [1], "a": "é"}

    assert digest_file(tmp_path / "empty").startswith("af1349b9f5f9a1a6a0404dea36dcc949")
    assert digest_file(tmp_path / "abc").startswith("6437b3ac38465133ffb63b75273a8db5")
    assert canonical_json(value).decode() == '{"a":"é","b":[1]}'
    assert digest_json(value).startswith("fe44b490e297c0523c2a1ce591fc7b3b")


def test_a_value_that_is_no_json_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / "record.json"
    write_json(path, {"step": 1})

    with pytest.raises(ValueError, match="Out of range float"):
        write_json(path, {"step": float("nan")})

    assert read_json(path) == {"step": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_in_the_place_of_a_file_is_replaced_and_not_followed(tmp_path):
    (tmp_path / "other.json").write_text("{}")
    path = tmp_path / "record.json"
    path.symlink_to("other.json")

    write_json(path, {"step": 1})

    assert read_json(path) == {"step": 1}
    assert (tmp_path / "other.json").read_text() == "{}"


def test_a_write_into_a_directory_that_is_not_there_names_the_file(tmp_path):
    path = tmp_path / "gone" / "record.json"

    with pytest.raises(FileNotFoundError) as error:
        write_json(path, {})

    assert error.value.filename == str(path)

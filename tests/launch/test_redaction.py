import json

from hypothesis import given
from hypothesis import strategies as st

from redco_flow.launch.redaction import Redactor, redact_record, redact_text

SECRET = b"hf_aBcDeFgHiJkL"


def pump(redactor, chunks):
    return b"".join([*map(redactor.feed, chunks), redactor.flush()])


def test_a_secret_is_blotted_out_wherever_the_chunks_are_cut():
    """Fault 31: no log, record, job script, process list, error or page shows the secret."""
    text = b"before " + SECRET + b" after"

    for cut in range(len(text) + 1):
        shown = pump(Redactor([SECRET]), [text[:cut], text[cut:]])
        assert shown == b"before [redacted] after"


@given(
    st.lists(st.sampled_from([b"ab", b"aab", b"abab", b"bba", b"a"]), min_size=1),
    st.lists(st.binary(max_size=6).map(lambda b: bytes(b"ab"[x % 2] for x in b)), max_size=8),
)
def test_no_cut_of_the_stream_shows_more_than_the_whole_stream_would(secrets, chunks):
    whole = pump(Redactor(secrets), [b"".join(chunks)])

    assert pump(Redactor(secrets), chunks) == whole
    assert not any(secret in part for secret in secrets for part in whole.split(b"[redacted]"))


def test_what_cannot_become_a_secret_is_shown_at_once():
    redactor = Redactor([SECRET])

    assert redactor.feed(b"step 1\n") == b"step 1\n"
    assert redactor.feed(b"step 2 hf_a") == b"step 2 "


def test_what_looks_like_a_secret_is_blotted_out_where_a_line_without_an_end_is_cut():
    token = b"ghp_" + b"aB3dE6gH9k" * 3 + b"xY1zW2"  # of GitHub, by its looks
    for place in range(16_300, 16_440, 7):  # a line of 32 KiB is cut in its middle
        line = b"." * place + b" " + token + b" "
        shown = pump(Redactor([]), [line + b"." * (32_800 - len(line)), b"more\n"])

        assert shown.count(b"[redacted]") == 1
        assert not any(token[at : at + 8] in shown for at in range(4, len(token) - 8))


def test_overlapping_secrets_leave_no_end_behind():
    shown = pump(Redactor([b"abcdefgh", b"efghijkl"]), [b"xabcdef", b"ghijklx"])

    assert shown == b"x[redacted]x"


def test_a_secret_inside_json_and_one_line_of_a_key_are_blotted_out():
    key = b"-----BEGIN KEY-----\nMIIEvQIBADAN\nBgkqhkiG9w0B\n-----END KEY-----"

    as_json = redact_text(json.dumps({"key": key.decode()}), [key])
    one_line = redact_text("second line: BgkqhkiG9w0B.", [key])

    assert as_json == '{"key": "[redacted]"}'
    assert one_line == "second line: [redacted]."


def test_bytes_that_are_no_text_pass_through():
    assert pump(Redactor([SECRET]), [b"\xff\xfe\x00", b"\x80"]) == b"\xff\xfe\x00\x80"


def test_records_of_texts_that_are_not_utf_8_can_be_written():
    """Half of a pair, as JSON may have it, and a byte in the name of a file."""
    record = {"label": f"\ud83d {SECRET.decode()}", "caf\udce9 long.jsonl": "\ud83d"}

    shown = redact_record(record, [SECRET])

    assert shown == {"label": "\\ud83d [redacted]", "caf\ufffd long.jsonl": "\\ud83d"}
    json.dumps(shown, ensure_ascii=False).encode()

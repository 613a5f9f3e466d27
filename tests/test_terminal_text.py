"""What names, messages and log lines hold is shown, and does nothing to a terminal."""

import io
import os
import subprocess
import sys
import unicodedata

import pytest

from redco_flow.cli.status import render_table
from redco_flow.orchestrate.run.attempt_files import clean_line
from redco_flow.terminal_text import VisibleStream, visible, without_codes

EVIL = "a\x1b[2J\x1b]0;title\x07b\x9b31m\u202etxt.exe\u2066\x08\x7f\r\u2028c"


def acts(text):
    """The characters of a text that a terminal obeys; a line's end and a tab are wanted."""
    kinds = ("Cc", "Cf", "Zl", "Zp", "Cs")
    return [c for c in text if c not in "\n\t" and unicodedata.category(c) in kinds]


def test_control_characters_are_written_out_by_their_numbers():
    """Nothing vanishes: who reads sees what was there."""
    shown = visible(EVIL)

    assert acts(shown) == []
    assert shown.startswith("a\\x1b[2J\\x1b]0;title\\x07b\\x9b31m\\u202etxt.exe")


def test_ordinary_text_of_every_script_is_left_alone():
    """Letters, combining marks, emoji, tables and line ends are no codes."""
    text = "loss\t0.5 ✓ … │ é e\u0301 日本 العربية 🙂\nnext\n"

    assert visible(text) == text


def test_a_windows_line_end_is_a_line_end_and_colours_go_without_a_trace():
    """Both come from programs that mean no harm."""
    assert visible("\x1b[1;31mred\x1b[0m\r\n") == "red\n"


@pytest.mark.parametrize(
    "line", ["\x1b[31mred\x1b[0m \x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", EVIL]
)
def test_a_log_line_has_no_codes(line):
    """What programs draw with goes; directions and the like are written out."""
    shown = clean_line(line.encode())

    assert acts(shown) == []
    assert "\x1b" not in without_codes(line)


def test_a_visible_stream_is_its_stream_in_all_but_the_text():
    """Descriptor, terminal or not, and flushing are the other's."""
    below = io.StringIO()
    stream = VisibleStream(below)

    print("a\x1b[2Jb", file=stream)
    stream.writelines(["\x07", "x\n"])
    stream.flush()

    assert below.getvalue() == "a\\x1b[2Jb\n\\x07x\n"
    assert stream.isatty() is below.isatty()


def test_an_error_of_the_command_line_shows_the_codes_of_a_name():
    """Also in the words of argparse."""
    environ = {**os.environ, "PYTHONIOENCODING": "utf-8"}
    for words in (["plan", EVIL.replace("\r", "")], [EVIL], ["plan", "x", f"--{EVIL}"]):
        command = [sys.executable, "-m", "redco_flow.cli.main", *words]
        done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)

        assert done.returncode == 2
        assert acts(done.stderr) == []
        assert "txt.exe" in done.stderr


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("schema > /dev/full", 2, "redco-flow: /dev/stdout: No space left on device."),
        ("--version > /dev/full", 2, "redco-flow: /dev/stdout: No space left on device."),
        ("logs nothing 2> /dev/full", 2, ""),
        ("nothing 2>&1 > /dev/null | true", 2, ""),
        ("schema >&- 2>&-", 0, ""),
        ("schema | true", 0, ""),
    ],
)
def test_output_that_nobody_can_read_is_an_error_only_on_a_full_disk(words, code, message):
    program = f"set -o pipefail; {sys.executable} -m redco_flow.cli.main {words}"
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=False)

    assert done.returncode == code
    assert done.stderr.startswith(message)
    assert bool(done.stderr) is bool(message)


def test_the_live_table_shows_the_codes_of_a_message():
    """It draws with codes of its own, so its texts are made visible one by one."""
    stage = {
        "state": "failed", "reused": False, "seconds": 1.0, "message": EVIL, "artifacts": {},
        "progress": None, "devices": None, "tflops_per_device": None, "mfu": None,
        "peak_memory_bytes": None,
    }  # fmt: skip
    table = render_table({"run": "x-abc123", "state": "failed", "stages": {"train": stage}})

    assert all(acts(cell) == [] for column in table.columns for cell in map(str, column.cells))

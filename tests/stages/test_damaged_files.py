"""Damaged files of every format, 1,300 in all: an error that names the file, never a signal."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "damaged_files.py"
SEED = 20
DATA = ("jsonl", "json", "csv", "tsv", "parquet", "arrow", "split", "array", "compressed", "lying")
MODELS = ("safetensors", "index", "config", "tokenizer", "vocabulary")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("formats", "num_cases"), [(DATA, 100), (MODELS, 60)], ids=["data", "models"]
)
def test_a_damaged_file_is_an_error_with_its_name_and_never_a_signal(tmp_path, formats, num_cases):
    """Fault 47. Many files a process: a signal ends it, and the file `case` says at which one."""
    command = [sys.executable, PROGRAM, tmp_path, str(SEED), str(num_cases), *formats]

    ended = subprocess.run(command, capture_output=True, text=True, timeout=500)

    case = (tmp_path / "case").read_text()
    assert ended.returncode == 0, f"at {case}: {ended.returncode}\n{ended.stderr[-4000:]}"
    *problems, memory, last = ended.stdout.splitlines()
    assert problems == []
    assert formats != DATA or int(memory.removeprefix("MiB ")) < 2000
    # Text with a changed letter is text, and a changed weight a weight: the others are refused.
    num_refused = int(last.removeprefix("refused "))
    assert num_refused > num_cases * len(formats) / 4

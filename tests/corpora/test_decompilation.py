"""The corpus of Python statements: the same rows in every process."""

import json
import os
import subprocess
import sys

from redco_flow.corpora.decompilation import rows

SCRIPT = """
import json, pathlib, sys
from redco_flow.corpora.decompilation import rows
print(json.dumps([row["bytecode"] for row in rows([pathlib.Path(sys.argv[1])])]))
"""


def bytecode(path, hash_seed):
    environment = os.environ | {"PYTHONHASHSEED": str(hash_seed)}
    command = [sys.executable, "-c", SCRIPT, str(path)]
    return json.loads(subprocess.check_output(command, env=environment, text=True))


def test_sets_of_constants_stand_in_one_order_whatever_the_processs_hash_seed(tmp_path):
    path = tmp_path / "module.py"
    path.write_text("assert word in {None, 'word', 2}\n")

    seen = [bytecode(path, hash_seed) for hash_seed in range(4)]

    assert seen == [seen[0]] * 4
    assert len(seen[0]) == 1
    assert "load_const frozenset({'s', 2, None})" in seen[0][0]


def test_a_constant_is_loaded_and_a_method_named_whatever_the_python(tmp_path):
    path = tmp_path / "module.py"
    path.write_text("pair = one.method(two)\nif (0, 1): pass\n")

    method, constant = rows([path])

    assert method["statement"] == "a = b.c(d)"
    assert method["bytecode"].split()[:2] == ["load", "b"]
    assert method["bytecode"].split()[3:] == ["c", "load", "d", "call", "1", "store", "a"]
    assert constant == {"bytecode": "load_const (0, 1)", "statement": "(0, 1)"}

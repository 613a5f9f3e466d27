"""The page about safety names each place where a file makes a process compute, and real tests."""

import ast
import re
from pathlib import Path

PROJECT = Path(__file__).parents[1]
PACKAGE = PROJECT / "redco_flow"
PAGE = (PROJECT / "docs/guides/safety.md").read_text()
CALLS = {
    *("rrulestr", "CronSim", "render_jinja_template", "apply_chat_template", "from_string"),
    *("urlopen", "build_opener", "HTTPConnection", "SMTP", "SMTP_SSL", "httpx.get", "requests.get"),
    *("HfApi", "get_session", "snapshot_download", "hf_hub_download"),
    *("load_dataset", "load_dataset_builder", "ParquetFile", "ZipFile", "ZstdDecompressor"),
    *(
        "gzip.open",
        "gzip.GzipFile",
        "CompressedInputStream",
        "bz2.open",
        "lzma.open",
        "tarfile.open",
        "Image.open",
    ),
}


def name_on_the_page(node):
    """Return the name of a call that the page has to list, or None."""
    if isinstance(node, ast.Attribute) and node.attr == "render_jinja_template":
        return node.attr
    if not isinstance(node, ast.Call):
        return None
    name = ast.unparse(node.func)
    if name == "re.compile":
        is_ours = isinstance(node.args[0], ast.Constant | ast.JoinedStr)
        return None if is_ours else name
    if name.startswith("subprocess.") and node.args and "'git'" in ast.unparse(node.args[0]):
        return "git"
    return next((one for one in (name, name.rpartition(".")[2]) if one in CALLS), None)


def test_each_place_where_a_file_makes_a_process_compute_is_on_the_page():
    table = PAGE.partition("## Limits on what")[2].partition("\n## ")[0]
    listed = {
        (module, call)
        for line in table.splitlines()
        if line.startswith("| `")
        for modules, calls in [line.split("|")[1:3]]
        for module in re.findall(r"`([^`]+)`", modules)
        for call in re.findall(r"`([^`]+)`", calls)
    }

    found = {
        (str(path.relative_to(PACKAGE)), name)
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if (name := name_on_the_page(node))
    }

    assert found - listed == set(), "docs/guides/safety.md has to say which limit it has"
    assert {module for module, _ in listed} - {module for module, _ in found} == set()


def test_each_row_about_code_names_tests_that_are_there():
    tables = PAGE.partition("## Limits on what")[0]
    rows = [line for line in tables.splitlines() if line.startswith("|")]
    rows = [line for line in rows if not line.startswith(("|---", "| what |", "| | allowed"))]

    assert len(rows) > 12
    for row in rows:
        tests = re.findall(r"`(tests/[\w/]+\.py)`", row)
        assert tests, row
        assert all((PROJECT / test).is_file() for test in tests), row

"""No call of `from_pretrained` may execute code of the repository that it loads."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "redco_flow"


def calls_without_refusal(source):
    """Return the lines of calls that leave trust_remote_code out, or allow it."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("from_pretrained", "from_config")
        and ast.unparse(node.func.value) != "PeftModel"  # wraps a model that is loaded already
        and not any(
            one.arg == "trust_remote_code"
            and isinstance(one.value, ast.Constant)
            and one.value.value is False
            for one in node.keywords
        )
    ]


def test_every_call_refuses_remote_code():
    found = {
        str(path.relative_to(PACKAGE)): lines
        for path in PACKAGE.rglob("*.py")
        if (lines := calls_without_refusal(path.read_text()))
    }

    assert found == {}


@pytest.mark.parametrize(
    "arguments", ["'a'", "'a', trust_remote_code=True", "'a', trust_remote_code=x", "**options"]
)
def test_a_call_without_refusal_is_found(arguments):
    assert calls_without_refusal(f"AutoTokenizer.from_pretrained({arguments})") == [1]
    assert calls_without_refusal("A.from_pretrained('a', trust_remote_code=False)") == []

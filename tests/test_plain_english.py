"""Code, messages and pages use the words of the JAX, Slurm and Prefect documentation."""

import ast
import io
import re
import tokenize
from pathlib import Path

PROJECT = Path(__file__).parents[1]
PACKAGE = PROJECT / "redco_flow"
PHRASES = re.compile(
    r"\b(?:(?:is|are|was|were|be|been) told|anew|whoever|nobody|so many|came to|comes to"
    r"|what (?:it|they) (?:is|are|was|were) asked for|(?:take|takes|took|taken) up"
    r"|(?:goes|went|going) on from|(?:stand|stands) (?:beside|there|in)"
    r"|whole set alone|(?:do|does) not tell)\b",
    re.IGNORECASE,
)
NOUN_CLAUSE = re.compile(r"(?:What|Which|Where|How|Who|Whose|Whom|Why)\b")
TEXTS = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}


def wrong_phrases(source):
    """Yield line and phrase of each comment, docstring and message that has one."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        text = " ".join(token.string.split()) if token.type in TEXTS else ""
        yield from ((token.start[0], match[0]) for match in PHRASES.finditer(text))


def noun_clauses(source):
    """Yield line and first word of each docstring that begins with a noun clause."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            match = NOUN_CLAUSE.match(ast.get_docstring(node) or "")
            if match is not None:
                yield getattr(node, "lineno", 1), match[0]


def checked_files():
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(PACKAGE).as_posix(), path.read_text(encoding="utf-8")


def test_the_rules_find_what_they_are_for():
    source = '"""What it does."""\n\nlog(f"{run} is\\n told anew")  # taken up\n'

    assert list(noun_clauses(source)) == [(1, "What")]
    assert {phrase for _, phrase in wrong_phrases(source)} >= {"anew", "taken up"}


def test_no_docstring_comment_or_message_has_a_phrase_that_is_always_wrong():
    found = [
        f"redco_flow/{name}:{line}: {phrase!r}"
        for name, source in checked_files()
        for line, phrase in wrong_phrases(source)
    ]

    assert found == []


def test_no_page_has_a_phrase_that_is_always_wrong():
    pages = [path for path in PROJECT.glob("*.md") if path.name != "CHANGELOG.md"]
    found = [
        f"{path.relative_to(PROJECT)}:{number}: {match[0]!r}"
        for path in [*pages, *(PROJECT / "docs").rglob("*.md")]
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        for match in PHRASES.finditer(line)
    ]

    assert found == []


def test_a_docstring_begins_with_a_verb_or_a_noun_and_not_with_a_clause():
    found = [
        f"redco_flow/{name}:{line}: {word} ..."
        for name, source in checked_files()
        for line, word in noun_clauses(source)
    ]

    assert found == []

"""The generated parts of the docs are committed and current; `make reference` writes them."""

import re
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parent.parent
DOCS = PROJECT / "docs"

if not (DOCS / "build_reference.py").is_file():
    pytest.skip("no docs next to the tests: not a checkout", allow_module_level=True)

PAGES = [PROJECT / "README.md", *sorted(DOCS.rglob("*.md"))]


@pytest.fixture
def build_reference(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    import build_reference

    return build_reference


def test_the_pages_of_keys_verbs_and_classes_are_current(build_reference):
    pages = build_reference.reference_pages()

    assert len(pages) == 5
    for name, text in pages.items():
        assert (DOCS / "reference" / name).read_text() == text, f"{name}: run `make reference`"


def test_files_quoted_in_pages_are_current(build_reference):
    texts = {page: page.read_text() for page in PAGES}

    quoted = [page for page, text in texts.items() if "<!-- file: " in text]
    stale = [page for page, text in texts.items() if build_reference.with_files(text) != text]

    assert len(quoted) >= 8
    assert stale == [], "run `make reference`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(PROJECT)))
def test_a_page_is_complete_without_a_build(page):
    """Neither snippets, directives nor attributes, which only a site's build replaces."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)

    assert "--8<--" not in page.read_text()
    assert re.findall(r"^(?::::|!!!|\?\?\?).*|\{[:#].*\}$|\{\{.*\}\}", text, re.MULTILINE) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(PROJECT)))
def test_every_link_of_a_page_leads_to_a_file_of_the_checkout(page):
    links = re.findall(r"\]\(([^)#\s]+)", page.read_text())

    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]

    assert missing == []

"""Tokenizers trained on data: deterministic, lossless, of the size asked for."""

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from redco_flow.stages.preprocess.tokenizer import save_tokenizer, train_tokenizer
from redco_flow.text.tokenizer import TextTokenizer

TEXTS = Path(__file__).read_text().splitlines() * 3
KINDS = ["bpe", "unigram"]


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_tokenizer(iter(TEXTS), 400, request.param), folder)
    return TextTokenizer.load(folder)


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_every_text_comes_back_from_its_ids(tokenizer, text):
    ids = tokenizer.encode_batch([text])

    assert tokenizer.decode_batch(ids) == [text.strip()]
    assert not {tokenizer.pad_id, tokenizer.eos_id} & set(ids[0])


def test_the_vocabulary_has_the_size_asked_for_and_the_special_tokens_come_first(tokenizer):
    assert tokenizer.vocab_size == 400
    assert (tokenizer.pad_id, tokenizer.eos_id) == (0, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_processes_with_other_hash_seeds_train_the_same_tokenizer(kind):
    code = (
        "import sys, hashlib; from pathlib import Path\n"
        "from redco_flow.stages.preprocess.tokenizer import train_tokenizer\n"
        f"texts = Path({str(__file__)!r}).read_text().splitlines() * 3\n"
        f"text = train_tokenizer(iter(texts), 400, {kind!r}).to_str()\n"
        "print(hashlib.sha256(text.encode()).hexdigest())"
    )

    digests = {
        subprocess.run(
            [sys.executable, "-c", code],
            check=True,
            capture_output=True,
            env={"PYTHONHASHSEED": str(seed), "PATH": "", "RAYON_NUM_THREADS": str(seed + 1)},
        ).stdout
        for seed in range(3)
    }

    assert len(digests) == 1


def test_unigram_needs_no_more_tokens_than_bpe_by_much(tmp_path):
    lengths = {}
    for kind in KINDS:
        save_tokenizer(train_tokenizer(iter(TEXTS), 400, kind), tmp_path / kind)
        trained = TextTokenizer.load(tmp_path / kind)
        lengths[kind] = sum(map(len, trained.encode_batch(TEXTS)))

    assert lengths["unigram"] < 1.1 * lengths["bpe"]


def test_a_vocabulary_too_small_for_bytes_is_an_error_with_the_least_size():
    with pytest.raises(ValueError, match="at least 259"):
        train_tokenizer(["a"], 100, "bpe")


def test_another_tokenizer_has_another_digest(tmp_path):
    digests = set()
    for kind in KINDS:
        for size in (300, 301):
            folder = tmp_path / f"{kind}{size}"
            save_tokenizer(train_tokenizer(iter(TEXTS), size, kind), folder)
            digests.add(TextTokenizer.load(folder).digest)

    assert len(digests) == 4

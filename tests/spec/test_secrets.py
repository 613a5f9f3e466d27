"""Which names and values are taken for secrets."""

from __future__ import annotations

import random
import re
import string

import pytest

from redco_flow.spec.secrets import (
    hide_secrets,
    looks_secret_name,
    looks_secret_value,
    secret_values,
)


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "hfToken",
        "token",
        "tokens",
        "my_token",
        "api_key",
        "OPENAI_API_KEY",
        "APIKey",
        "X-Api-Key",
        "GITHUB_PAT",
        "PGPASSWORD",
        "db_passwd",
        "password",
        "AWS_SECRET_ACCESS_KEY",
        "client_secret",
        "credentials",
        "GOOGLE_APPLICATION_CREDENTIALS",
        "private_key",
        "WANDB_API_KEY",
        "SSH_PASSPHRASE",
    ],
)
def test_a_name_of_a_secret_is_recognised(name):
    assert looks_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "tokenizer",
        "source_key",
        "target_key",
        "pad_token",
        "eos_token_id",
        "decoder_start_token_id",
        "max_tokens",
        "tokens_per_second",
        "num_tokens",
        "PATH",
        "PWD",
        "HOME",
        "token_env",
        "HF_TOKEN_ENV",
        "keep",
        "data",
        "keys",
        "compat",
        "SSH_AUTH_SOCK",
        "secretary",
        "passage",
    ],
)
def test_an_ordinary_name_is_no_secret(name):
    assert not looks_secret_name(name)


@pytest.mark.parametrize(
    "value",
    [
        "hf_" + "aB3" * 11,
        "sk-proj-" + "a1B2" * 8,
        "ghp_" + "0123456789" * 4,
        "github_pat_" + "A1b2" * 8,
        "AKIA" + "IOSFODNN7EXAMPLE",
        "https://user:" + "hunter2" + "@example.org/x",
        "text before hf_" + "aB3" * 11 + " and after",
        "-----BEGIN OPENSSH " + "PRIVATE KEY-----",
    ],
)
def test_a_value_that_looks_like_a_token_is_recognised_and_hidden(value):
    assert looks_secret_value(value)
    assert not looks_secret_value(hide_secrets(value))


LETTERS, HEX = string.ascii_letters + string.digits, "0123456789abcdef"
# The shapes that their makers' pages and public scanners give; the characters are drawn.
TOKENS = """
hf_ L34 | sk- L20 T3BlbkFJ L20 | sk-proj- L74 T3BlbkFJ L74 | sk-svcacct- L60 T3BlbkFJ L60
sk-ant-api03- L93 AA | sk-or-v1- H64 | gsk_ L52 | r8_ L37 | pplx- L48 | xai- L80 | fw_ L23 9
ghp_ L36 | ghs_ L36 | github_pat_ L22 _ L59 | glpat- L20 | glrt- L20 | gldt- L20 | glptt- H40
AKIA U16 | ASIA U16 | IQoJb3JpZ2luX2VjE L300 | aws_secret_access_key= L40
AIza L35 | ya29. L120 | GOCSPX- L28 | 1//0 L60 | L76 AZDO L4 | AccountKey= L86 ==
xoxb- D12 - D12 - L24 | xapp-1-A U10 - D13 - H64 | https://hooks.slack.com/services/ U9 / U9 / L24
WANDB_API_KEY= H40 | wandb_api_key:~ H40 | wandb~login~ H40 | wandb_v1_ L77
machine~api.wandb.ai~login~user~password~ H40 | MLFLOW_TRACKING_TOKEN= L40 | dapi H32
nvapi- L64 | NGC_API_KEY= L84 | COMET_API_KEY= L25 | NEPTUNE_API_TOKEN= L100
eyJhcGlfYWRkcmVzcyI6 L100 | {"username":"me","key":" H32 "} | KGAT_ H32 | ZENPROKEY_ L60
rpa_ L46 | ak- L20 7x | as- L20 7x | secret_name_ L32 . L40 | tskey-auth- L12 - L32
sntrys_ L150 | https:// H32 @o1.ingest.sentry.io/4 | ntn_ L46 | pnu_ L36 | pnb_ L36
npm_ L36 | pypi- L170 | dckr_pat_ L27 | hvs. L95 | glsa_ L32 _ H8 | lsv2_pt_ H32 _ H10
"""
_PART = re.compile(r"(?:^|(?<= ))([LHUD])(\d+)(?= |$)")


def drawn(shape, seed):
    """Return a token of a shape: `L20` is 20 letters and digits, H hex, U upper case, D digits."""
    chance = random.Random(seed)
    kinds = {"L": LETTERS, "H": HEX, "U": string.ascii_uppercase, "D": string.digits}
    text = _PART.sub(
        lambda part: "".join(chance.choices(kinds[part[1]], k=int(part[2]))), shape.strip()
    )
    return text.replace(" ", "").replace("~", " ")


def test_tokens_of_common_services_are_hidden():
    shapes = [shape for line in TOKENS.split("\n") for shape in line.split("|") if shape.strip()]
    values = [drawn(shape, seed) for seed in range(5) for shape in shapes]

    texts = [text.format(value) for value in values for text in ("by {}, or", "({})", "Use {}.")]
    assert [text for text in texts if not looks_secret_value(text)] == []


@pytest.mark.parametrize(
    "value",
    [
        "google-t5/t5-base",
        "as-internationalizations",
        "fw_gradient_accumulation_steps",
        "secret_santa_dataset.csv",
        "wandb login --relogin",
        "https://sentry.io/welcome",
        "sk-learn-models-large-text",
        "hf_xsum",
        "http://localhost:4200/api",
        "user@host:/path",
        "12:30:00",
        "a" * 64,
        "/data/risk-models-2024-10-31/train.csv",
    ],
)
def test_an_ordinary_value_is_no_secret(value):
    assert not looks_secret_value(value)


def test_secret_values_of_an_environment_are_the_long_ones_longest_first():
    environ = {
        "HF_TOKEN": "abcdefghijkl",
        "API_KEY": "abcdefgh",
        "DB_PASSWORD": "short",
        "HOME": "/home/somebody",
    }

    assert secret_values(environ) == [b"abcdefghijkl", b"abcdefgh"]


def test_a_secret_that_is_not_unicode_keeps_its_bytes():
    raw = b"\xff\xfe secret bytes"

    assert secret_values({"TOKEN": raw.decode("utf-8", "surrogateescape")}) == [raw]

"""Which names and values are taken for secrets."""

from __future__ import annotations

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


@pytest.mark.parametrize(
    "value",
    [
        "google-t5/t5-base",
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

"""Variables that a job fetches for itself, from servers that answer as Google's do."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from redco_flow.launch.xmanager.stored_secrets import (
    STORED_VARIABLES,
    SecretNotFetched,
    fetch_stored_variables,
)

NAME = "projects/research-1/secrets/hf/versions/latest"
ANSWERS = {
    "/computeMetadata/v1/instance/service-accounts/default/token": (
        ("Metadata-Flavor", "Google"),
        {"access_token": "of-the-machine", "expires_in": 3599, "token_type": "Bearer"},
    ),
    f"/v1/{NAME}:access": (
        ("Authorization", "Bearer of-the-machine"),
        {"name": NAME, "payload": {"data": base64.b64encode(b"hf_secret").decode()}},
    ),
}


class Google(BaseHTTPRequestHandler):
    def do_GET(self):
        (header, value), answer = ANSWERS.get(self.path, (("", None), None))
        if answer is None or self.headers[header] != value:
            self.send_error(403)
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, *_):
        """Say nothing."""


@pytest.fixture
def google():
    with HTTPServer(("127.0.0.1", 0), Google) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def fetch(address, stored):
    environ = {STORED_VARIABLES: json.dumps(stored)}
    return fetch_stored_variables(environ, metadata=address, manager=address)


def test_a_variable_gets_what_the_secret_holds(google):
    assert fetch(google, {"HF_TOKEN": NAME}) == {"HF_TOKEN": "hf_secret"}


def test_nobody_is_asked_where_nothing_is_stored():
    assert fetch_stored_variables({}) == {}


def test_a_secret_that_is_refused_is_named_with_its_variable_and_the_role_that_it_needs(google):
    with pytest.raises(SecretNotFetched, match=r"HF_TOKEN: .*/other/.*403.*Secret Accessor"):
        fetch(google, {"HF_TOKEN": NAME.replace("/hf/", "/other/")})


def test_a_machine_without_a_token_is_told():
    with pytest.raises(SecretNotFetched, match=r"no token from http://127.0.0.1:1"):
        fetch("http://127.0.0.1:1", {"HF_TOKEN": NAME})

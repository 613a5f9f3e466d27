"""Serve Prefect's API at a socket that listens already.

`python -P prefect_serving.py DESCRIPTOR [--until-input-ends]`. Whoever starts this has opened the
socket, so that nobody else can have its port, however long Prefect takes to start. The end of
standard input comes with the end of the process that holds its other side, whatever ends that.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence

_SECONDS_TO_END = 5.0
_SECONDS_OF_IDLE_CONNECTION = 5


def main(arguments: Sequence[str]) -> None:
    """Serve until told to end."""
    parser = argparse.ArgumentParser(prog="prefect_serving")
    parser.add_argument("descriptor", type=int)
    parser.add_argument("--until-input-ends", action="store_true")
    options = parser.parse_args(arguments)
    if options.until_input_ends:
        # Before anything that takes time.
        threading.Thread(target=_end_with_input, daemon=True).start()
    import uvicorn

    config = uvicorn.Config(
        "prefect.server.api.server:create_app",
        factory=True,
        access_log=False,
        log_level="warning",
        timeout_keep_alive=_SECONDS_OF_IDLE_CONNECTION,
    )
    uvicorn.Server(config).run(sockets=[socket.socket(fileno=options.descriptor)])


def _end_with_input() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_SECONDS_TO_END)
    os._exit(1)  # a request, or Prefect's start, may take for ever


if __name__ == "__main__":
    main(sys.argv[1:])

"""An S3 server in a separate process on loopback."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
from collections.abc import Iterator

import pytest
from pyarrow import fs

BUCKET = "change-logs"
SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"

SERVE = """
import sys
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

s3 = DomainDispatcherApplication(create_backend_app)

def served(environ, respond):
    if "unconditional" in sys.argv:
        environ.pop("HTTP_IF_NONE_MATCH", None)
    return s3(environ, respond)

server = make_server("127.0.0.1", 0, served, threaded=True)
print(server.port, flush=True)
server.serve_forever()
"""

_bucket_ids = itertools.count(1)


@contextlib.contextmanager
def s3_server(*arguments: str) -> Iterator[str]:
    """The address of a server that runs during the block."""
    with subprocess.Popen(
        [sys.executable, "-c", SERVE, *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as server:  # fmt: skip
        assert server.stdout is not None
        yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        server.terminate()


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """An S3 server for all tests."""
    with s3_server() as address:
        yield address


@pytest.fixture
def s3_uri(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty prefix in a bucket; the environment has the address and credentials."""
    return place_in(s3_endpoint, monkeypatch)


@pytest.fixture
def unconditional_s3_uri(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The same on a server that ignores the conditions of a PUT."""
    with s3_server("unconditional") as address:
        yield place_in(address, monkeypatch)


def place_in(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    owner = fs.S3FileSystem(endpoint_override=endpoint, region="us-east-1", allow_bucket_creation=True)
    owner.create_dir(BUCKET)
    return f"s3://{BUCKET}/logs/{next(_bucket_ids)}"

"""Credentials that are wrong, or expire at any request: what is said, and that nothing is lost."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from remote_runs import remotes
from remote_runs.remotes import MemoryBucket
from remote_runs.s3_faults import FaultyProxy, MemoryS3, Request, Response, client
from store_runs.stores import content, open_store, stored
from tensor_dedup import Store
from tensor_dedup.errors import NOBODY_THERE
from tensor_dedup.remote import Remote
from tensor_dedup.remote.environment import scrubbed
from tensor_dedup.remote.errors import (
    DamagedRemoteError,
    NotARemoteError,
    RemoteAccessError,
    RemoteUnreachableError,
)

HOUR = 3600.0
_HEAD = '<?xml version="1.0" encoding="UTF-8"?>\n'
EXPIRED = f"{_HEAD}<Error><Code>ExpiredToken</Code><Message>It has expired.</Message></Error>"
_NO_KEY = json.dumps({"private_key": "none", "private_key_id": "1", "client_email": "a@host"})
VERBS = ("first push", "push", "push over", "pull", "delete", "gc", "verify", "list", "usage")


class Expiring:
    """A server that takes no credentials any more from a request on."""

    def __init__(self, upstream: MemoryS3, at: int, status: int) -> None:
        self._upstream, self._at, self._status = upstream, at, status
        self.asked = 0

    def answer(self, request: Request) -> Response:
        self.asked += 1
        if self.asked <= self._at:
            return self._upstream.answer(request)
        return Response(self._status, {"Content-Type": "application/xml"}, EXPIRED.encode())


@pytest.fixture(scope="module")
def start(filled: Path) -> dict[str, MemoryBucket]:
    """What each verb finds."""
    full = open_store(filled / "full")
    based = MemoryBucket()
    full.push(Remote(based), "base")
    both = based.copied()
    full.push(Remote(both), "tune")
    swept = both.copied()
    Remote(swept).delete("tune")
    swept.clock += 25 * HOUR
    assert Remote(swept).gc(24).condemn
    swept.clock += 25 * HOUR
    begins = {"first push": MemoryBucket(), "push": based, "gc": swept}
    return {verb: begins.get(verb, both) for verb in VERBS}


def work_of(verb: str, full: Store, here: Store) -> Callable[[Remote], object]:
    return {
        "first push": lambda remote: full.push(remote, "base"),
        "push": lambda remote: full.push(remote, "tune"),
        "push over": lambda remote: full.push(remote, "tune", replace=True),
        "pull": lambda remote: here.pull(remote, "tune"),
        "delete": lambda remote: remote.delete("tune"),
        "gc": lambda remote: remote.gc(24),
        "verify": lambda remote: remote.verify(full=True),
        "list": lambda remote: remote.checkpoints(),
        "usage": lambda remote: remote.usage(),
    }[verb]


# S3 answers 400 where a token has expired, others 403; 401 is what a gateway before them says.
@pytest.mark.parametrize(
    ("verb", "status"),
    [
        *((verb, 403) for verb in VERBS),
        *(
            pytest.param(verb, 400, marks=[] if verb in ("push", "pull") else pytest.mark.long)
            for verb in VERBS
        ),
    ],
)
def test_credentials_that_expire_at_any_request_are_said_to(
    tmp_path: Path, full: Store, start: dict[str, MemoryBucket], verb: str, status: int
) -> None:
    """Nothing is lost, damage is neither seen nor noted, and with new ones it goes on."""
    refused, number = 0, 0
    while True:
        bucket, here = start[verb].copied(), open_store(tmp_path / f"here-{number}")
        server = Expiring(MemoryS3(bucket), number, status)
        proxy = FaultyProxy(server)
        before = dict(bucket.objects)
        work = work_of(verb, full, here)
        said: RemoteAccessError | None = None
        try:
            work(Remote(client(proxy.port)))
        except RemoteAccessError as error:
            said = error
        proxy.close()
        if said is not None:
            refused += 1
            assert said.exit_status == NOBODY_THERE
            assert str(said).startswith("s3://bucket/"), number
            assert "AWS_SESSION_TOKEN" in str(said)
            assert "ExpiredToken: It has expired." in str(said) or "HEAD" in str(said), number
        if verb in ("verify", "list", "usage"):
            assert bucket.objects == before
        assert said is not None or not proxy.requests[number:], (number, proxy.requests[number:])
        if "FORMAT" in bucket.objects:
            found = Remote(bucket).verify(full=True)
            assert not [fault for fault in found.faults if fault.affected], (number, found.faults)
        assert here.verify(full=True).fine
        if server.asked <= number:
            break
        if verb != "delete" or "tune" in Remote(bucket).names():
            work(Remote(bucket))
        if verb == "pull":
            assert stored(here, "tune") == content(tmp_path / "tune")
        number += 1
    assert refused >= max(number - 2, 2)


class Reading:
    """A server for somebody who may read and list only."""

    def __init__(self, upstream: MemoryS3) -> None:
        self._upstream = upstream

    def answer(self, request: Request) -> Response:
        if request.deletes:
            key = request.name.removeprefix("DELETE ")
            gone = f"<Key>{key}</Key><Code>AccessDenied</Code><Message>No.</Message>"
            said = f"{_HEAD}<DeleteResult><Error>{gone}</Error></DeleteResult>"
            return Response(200, {"Content-Type": "application/xml"}, said.encode())
        if request.verb == "PUT":
            said = f"{_HEAD}<Error><Code>AccessDenied</Code><Message>No.</Message></Error>"
            return Response(403, {"Content-Type": "application/xml"}, said.encode())
        return self._upstream.answer(request)


class Refusing:
    """A server that answers everything with one error of S3's."""

    def __init__(self, code: str) -> None:
        self._code = code

    def answer(self, request: Request) -> Response:
        said = f"{_HEAD}<Error><Code>{self._code}</Code><Message>No.</Message></Error>"
        return Response(400, {"Content-Type": "application/xml"}, said.encode())


@pytest.mark.parametrize("code", ["ExpiredToken", "InvalidToken", "TokenRefreshRequired"])
def test_a_token_that_is_refused_with_400_is_a_credential(full: Store, code: str) -> None:
    proxy = FaultyProxy(Refusing(code))
    with pytest.raises(RemoteAccessError, match=rf"400 Bad Request: {code}: No.*AWS_SESSION_TOKEN"):
        full.push(Remote(client(proxy.port)), "base")
    proxy.close()


def test_who_may_only_read_is_told_so(tmp_path: Path, full: Store) -> None:
    bucket = MemoryBucket()
    proxy = FaultyProxy(Reading(MemoryS3(bucket)))
    with pytest.raises(RemoteAccessError, match=r"PUT http.*403 Forbidden: AccessDenied: No\."):
        full.push(Remote(client(proxy.port)), "base")
    assert not bucket.objects
    full.push(Remote(bucket), "base")
    remote = Remote(client(proxy.port))
    with pytest.raises(RemoteAccessError, match="AccessDenied"):
        full.push(remote, "tune")
    with pytest.raises(RemoteAccessError, match="AccessDenied"):
        remote.bucket.delete("refs/base")
    with pytest.raises(RemoteAccessError, match="AccessDenied"):
        remote.delete("base")
    open_store(tmp_path / "here").pull(remote, "base")
    proxy.close()


def test_the_reason_of_a_server_is_said_and_what_was_signed_is_not() -> None:
    where = "http://127.0.0.1:8333/bucket/" + "long/" * 60 + "refs/base"
    document = (
        f"{_HEAD}<Error><Code>SignatureDoesNotMatch</Code>\n<Message>It is another.</Message>"
        "<AWSAccessKeyId>AKIAHIDDEN</AWSAccessKeyId><StringToSign>hidden</StringToSign></Error>"
    )
    text = (
        "The operation lacked the necessary privileges to complete for path refs/base: Error "
        f"performing GET {where} in 1.25ms, after 2 retries, max_retries: 2, retry_timeout: 20s - "
        f"Server returned non-2xx status code: 403 Forbidden: {document}\n\nDebug source:\nhidden"
    )
    said = "status code: 403 Forbidden: SignatureDoesNotMatch: It is another."
    assert scrubbed(text) == f"GET http://127.0.0.1:8333: {said}"
    assert scrubbed(text.replace(document, "")).endswith("status code: 403 Forbidden:")
    # So obstore shows a URL with a token in it.
    assert scrubbed(text.replace(where, "REDACTED")) == f"GET REDACTED: {said}"


def test_a_token_that_was_cut_short_is_no_matter_of_the_network(full: Store) -> None:
    """S3 answers 400 to it, as where it has expired."""

    class Refusing:
        def answer(self, request: Request) -> Response:
            said = f"{_HEAD}<Error><Code>InvalidToken</Code><Token-0>hidden</Token-0></Error>"
            return Response(400, {"Content-Type": "application/xml"}, said.encode())

    proxy = FaultyProxy(Refusing())
    with pytest.raises(RemoteAccessError, match=r"InvalidToken; set .*AWS_SESSION_TOKEN") as caught:
        full.push(Remote(client(proxy.port)), "base")
    assert "hidden" not in str(caught.value)
    proxy.close()


def test_a_name_that_speaks_of_credentials_is_no_sign_of_them(full: Store) -> None:
    proxy = FaultyProxy(MemoryS3(MemoryBucket()))
    full.rename("base", "credentials-7b")
    proxy.arm(0, "500, for good")
    with pytest.raises(RemoteUnreachableError, match="check the URL"):
        full.push(Remote(client(proxy.port, retries=0)), "credentials-7b")
    proxy.close()


def test_a_container_that_is_empty_is_damage_under_a_long_prefix_too(
    tmp_path: Path, full: Store
) -> None:
    """The sign of it is at the end of what obstore says, behind the whole URL."""
    bucket = MemoryBucket()
    proxy = FaultyProxy(MemoryS3(bucket))
    remote = Remote(client(proxy.port, "/".join(["a-long-prefix"] * 20)))
    full.push(remote, "base")
    for key in [key for key in bucket.objects if "/containers/" in key]:
        bucket.objects[key] = (b"", *bucket.objects[key][1:])
    here = open_store(tmp_path / "here")
    with pytest.raises(DamagedRemoteError):
        here.pull(remote, "base")
    assert here.verify(full=True).fine
    assert not remote.verify(full=True).fine
    proxy.close()


@pytest.mark.parametrize(
    ("url", "name", "value", "says"),
    [
        ("s3://bucket/x", "AWS_ACCESS_KEY_ID", "the-key-alone", "Missing SecretAccessKey"),
        ("s3://bucket/x", "AWS_SECRET_ACCESS_KEY", "the-secret-alone", "Missing AccessKeyId"),
        ("gs://bucket/x", "GOOGLE_SERVICE_ACCOUNT_KEY", "no-json", "decode service account file"),
        ("gs://bucket/x", "GOOGLE_SERVICE_ACCOUNT_KEY", _NO_KEY, "pem file"),
        ("gs://bucket/x", "GOOGLE_APPLICATION_CREDENTIALS", "/nowhere.json", "No such file"),
        ("az://container/x", "AZURE_STORAGE_ACCOUNT_KEY", "no base 64", "Invalid Access Key"),
        ("az://container/x", "AZURE_STORAGE_SAS_TOKEN", "no-query", "SAS query"),
    ],
)
def test_credentials_that_cannot_be_used_are_no_matter_of_the_url(
    monkeypatch: pytest.MonkeyPatch, url: str, name: str, value: str, says: str
) -> None:
    for each in [each for each in os.environ if each.startswith(("AWS_", "AZURE_", "GOOGLE_"))]:
        monkeypatch.delenv(each)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv(name, value)
    with pytest.raises(RemoteAccessError, match=rf"^{url}: .*{says}.*; set ") as caught:
        Remote.open(url)
    assert value not in str(caught.value)


def test_nobody_is_told_to_push_to_a_web_server(tmp_path: Path, full: Store) -> None:
    (tmp_path / "served").mkdir()
    with (
        remotes.web(tmp_path / "served") as url,
        pytest.raises(NotARemoteError, match=r"check the URL.*FORMAT and refs") as caught,
    ):
        full.pull(url, "base")
    assert "push" not in str(caught.value)

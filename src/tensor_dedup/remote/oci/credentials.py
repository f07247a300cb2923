"""Where `docker login` and `oras login` keep the users and passwords of registries.

They are in Docker's configuration file, in the files that DOCKER_CONFIG and REGISTRY_AUTH_FILE
name, and in the credential helpers that such a file names. No message shows what a file or a helper
says, which may be a secret.
"""

import logging
import os
import subprocess
from base64 import b64encode
from pathlib import Path
from typing import Annotated, Final

import msgspec

from tensor_dedup.remote.errors import RemoteAccessError
from tensor_dedup.store.files import Files
from tensor_dedup.store.folders import content_of

_log = logging.getLogger(__name__)
# A helper may ask its user to unlock something.
_HELPER_S: Final = 120.0


# As base64 writes it: the message about a header that cannot be sent would show it.
_Auth = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9+/=_-]*\Z")]


class _Entry(msgspec.Struct):
    auth: _Auth | None = None


class _Configuration(msgspec.Struct, rename="camel"):
    """What Docker's configuration file says of registries, by their names."""

    auths: dict[str, _Entry] = {}
    cred_helpers: dict[str, str] = {}
    creds_store: str | None = None


class _Credential(msgspec.Struct, rename="pascal"):
    """What a credential helper says."""

    username: str
    secret: str


def basic_credential(url: str, host: str, files: Files) -> str | None:
    """Return the user and password for the registry `host`, as HTTP's scheme Basic encodes them.

    Returns None if there are none. `url` is that of an artifact there, for messages.

    Raises:
        RemoteAccessError: A file cannot be read, or a helper does not answer as one.
    """
    here = {"localhost": "127.0.0.1", "127.0.0.1": "localhost"}
    name, _, port = host.partition(":")
    hosts = [host, *([f"{here[name]}:{port}".rstrip(":")] if name in here else [])]
    for path in _paths():
        found = _read(url, path, files)
        for each in hosts:
            if (entry := found.auths.get(each)) is not None and entry.auth:
                return entry.auth
            for helper in (found.cred_helpers.get(each), found.creds_store):
                if helper and (said := _ask(url, helper, each)) is not None:
                    return said
    return None


def _paths() -> list[Path]:
    docker, other = os.environ.get("DOCKER_CONFIG"), os.environ.get("REGISTRY_AUTH_FILE")
    return [
        *([Path(docker, "config.json")] if docker else []),
        *([Path(other)] if other else []),
        Path("~/.docker/config.json").expanduser(),
    ]


def _read(url: str, path: Path, files: Files) -> _Configuration:
    try:
        if files.status(path) is None:
            return _Configuration()
        return msgspec.json.decode(b"".join(content_of(files, path)), type=_Configuration)
    except (OSError, msgspec.DecodeError, ValueError, RecursionError) as error:
        what = f"{path} cannot be read as a file of credentials ({type(error).__name__})"
        raise RemoteAccessError.at(url, what) from None


def _ask(url: str, suffix: str, host: str) -> str | None:
    """Ask one of Docker's credential helpers for a user and a password; None if it has none."""
    command = f"docker-credential-{suffix}"
    try:
        found = subprocess.run(
            [command, "get"], input=host.encode(), capture_output=True, timeout=_HELPER_S
        )
    except subprocess.TimeoutExpired:
        what = f"the credential helper {command} does not answer"
        raise RemoteAccessError.at(url, what) from None
    except OSError as error:
        _log.warning("the credential helper %s cannot be run: %s", command, error.strerror)
        return None
    if found.returncode:
        _log.info("the credential helper %s has nothing for %s", command, host)
        return None
    try:
        said = msgspec.json.decode(found.stdout, type=_Credential)
    except (msgspec.DecodeError, ValueError, RecursionError):
        what = f"the credential helper {command} gave no user and password"
        raise RemoteAccessError.at(url, what) from None
    return b64encode(f"{said.username}:{said.secret}".encode()).decode()

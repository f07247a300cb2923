"""The configuration file `tensor-dedup.toml`: this user's store, remote, socket and budget.

    store = "/data/store"         # a path, relative to the file's folder, or with ~
    remote = "s3://bucket/models" # where `store://NAME` is pulled from; a URL
    socket = "/run/user/1000/tensor-dedup/manager.sock"
    budget = "32GiB"              # of `tensor-dedup serve` without --device

For each key, the file in the working folder takes precedence over the one in the user's
configuration folder. Command-line options and environment variables take precedence over both.
"""

import os
import re
import tomllib
from contextlib import suppress
from fractions import Fraction
from os import PathLike
from pathlib import Path
from typing import Any, Final

import platformdirs

from tensor_dedup.errors import ConfigError
from tensor_dedup.suggestions import nearest

FILE: Final = "tensor-dedup.toml"
# Names the file to read in place of the user's own.
ENVIRONMENT: Final = "TENSOR_DEDUP_CONFIG"
REMOTE_ENVIRONMENT: Final = "TENSOR_DEDUP_REMOTE"
CACHE_ENVIRONMENT: Final = "TENSOR_DEDUP_CACHE"
_PATHS: Final = ("store", "socket")
_KEYS: Final = (*_PATHS, "remote", "budget")
# Sizes as people write them: `64G`, `1.5GiB`, `1048576`.
_SIZE: Final = re.compile(r"(\d{1,32}(?:\.\d{1,32})?)\s*([KMGT]?)(i?)(B?)", re.IGNORECASE)
# In bytes. What computes with sizes in 64 bits, for thousands of machines, does not overflow.
LARGEST_SIZE: Final = 1 << 50
_POWERS: Final = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def files() -> list[Path]:
    """Return the configuration files that exist, with the one that takes precedence first.

    Raises:
        ConfigError: TENSOR_DEDUP_CONFIG names a file that does not exist.
    """
    named = os.environ.get(ENVIRONMENT)
    if named and not Path(named).exists():
        what = f"{ENVIRONMENT} names it, and it is not there; correct or unset the variable"
        raise ConfigError(f"{named}: {what}", file=named)
    own = Path(named) if named else platformdirs.user_config_path("tensor-dedup") / FILE
    found = []
    for path in (Path(FILE), own):
        # A working folder that is gone, or that another user may not enter, holds none for us.
        with suppress(PermissionError, FileNotFoundError):
            if path.is_file():
                found.append(path.absolute())
    return found


def configured_path(key: str) -> Path | None:
    """Return the path that a configuration file sets for `key`, or None if none does.

    `key` is "store" or "socket".

    Raises:
        ConfigError: A file cannot be read, or has an unknown key or a wrong value.
    """
    for file in files():
        value = _read(file).get(key)
        if value is not None:
            path: Path = file.parent / value
            return path
    return None


def configured_budget() -> int | None:
    """Return the `budget` that a configuration file sets, in bytes, or None if none does.

    Raises:
        ConfigError: A file cannot be read, or has an unknown key or a wrong value.
    """
    value = _value("budget")
    return None if value is None else parse_size(value)


def remote_url(given: str | PathLike[str] | None = None) -> str | None:
    """Return the URL of the remote to pull from, or None if none is set.

    The first of these that is set counts:

    1. `given`;
    2. the environment variable TENSOR_DEDUP_REMOTE;
    3. `remote` in a configuration file.

    Raises:
        ConfigError: A file cannot be read, or has an unknown key or a wrong value.
    """
    if given:
        return str(given)
    url: str | None = os.environ.get(REMOTE_ENVIRONMENT) or _value("remote")
    return url


def cache_folder() -> Path:
    """Return the absolute path of the folder of caches, each of which may be deleted.

    It is that in the environment variable TENSOR_DEDUP_CACHE, or else one in the user's folder of
    caches. It may not exist yet.
    """
    named = os.environ.get(CACHE_ENVIRONMENT)
    return Path(named or platformdirs.user_cache_path("tensor-dedup")).absolute()


def parse_size(given: object) -> int | None:
    """Return the number of bytes that a text such as `64G`, or an integer, means.

    `64G`, `64Gi` and `64GiB` count in powers of 1024, `64GB` in powers of 1000. Return None for
    anything else, and for a size beyond 1024 TiB.
    """
    nbytes = _parsed(given) if isinstance(given, str) else given
    if isinstance(nbytes, int) and not isinstance(nbytes, bool) and 0 <= nbytes <= LARGEST_SIZE:
        return nbytes
    return None


def _parsed(text: str) -> int | None:
    match = _SIZE.fullmatch(text.strip())
    if match is None or (match[3] and not match[2]):
        return None
    base = 1000 if match[2] and match[4] and not match[3] else 1024
    return int(Fraction(match[1]) * base ** _POWERS[match[2].upper()])


def _value(key: str) -> Any:
    return next((found[key] for file in files() if key in (found := _read(file))), None)


def _read(file: Path) -> dict[str, Any]:
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file}: cannot be read ({error}); mend it", file=str(file)) from error
    for key, value in found.items():
        if key not in _KEYS:
            near = nearest(key, _KEYS, most=1)
            advice = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(_KEYS)}"
            raise _wrong(file, key, "is no setting", advice)
        if key in _PATHS:
            found[key] = _path(file, key, value)
        if key == "remote" and (not isinstance(value, str) or "://" not in value):
            # Not shown: it may hold a credential.
            raise _wrong(file, key, "is no URL", 'give one, for example "s3://bucket/models"')
        if key == "budget" and not parse_size(value):
            raise _wrong(file, key, f"is {value!r}", 'give a size, for example "32GiB"')
    return found


def _path(file: Path, key: str, value: object) -> Path:
    if not isinstance(value, str) or not value or "\0" in value:
        raise _wrong(file, key, f"is {value!r}", 'give a path as text, as in "/data/store"')
    try:
        return Path(value).expanduser()
    except RuntimeError as error:  # of a user who is none, or has no home
        advice = "there is no such home; write the path in full"
        raise _wrong(file, key, f"is {value!r}", advice) from error


def _wrong(file: Path, key: str, what: str, advice: str) -> ConfigError:
    return ConfigError(f"{file}: {key} {what}; {advice}", file=str(file), key=key)

"""The file that lists the models to serve, `models.toml`.

room = "4GiB"                 # memory that each engine takes beside its weights

[models.base]
path = "store://base"         # or a folder, a file, a name in the Hugging Face cache, a step
replicas = 2

[models.customer-17]
path = "models/customer-17"   # relative to the folder of this file
room = "6GiB"                 # for this model, in place of the value above
host = "2GiB"                 # machine memory of each engine, if the weights are on a device
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tensor_dedup.errors import ConfigError
from tensor_dedup.settings import parse_size
from tensor_dedup.suggestions import perhaps

_DEFAULTS: Final = ("room", "host", "replicas")
_FIELDS: Final = ("path", *_DEFAULTS)
_SHOWN: Final = 60  # characters of a value that is wrong


@dataclass(frozen=True, slots=True)
class Wanted:
    """A model in the file: its name, where its weights are, and what it needs. Sizes are in bytes.

    Besides the weights, each engine takes `room`. If the weights are on a device, the engine also
    takes `host` of the machine's memory.
    """

    name: str
    path: str
    room: int
    host: int
    replicas: int


def read_fleet(path: Path) -> list[Wanted]:
    """Return the models that the file `path` lists, in the order of the file.

    Raises:
        ConfigError: The file cannot be read, or has an unknown field or a wrong value.
    """
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path} cannot be read: {why}", path=str(path)) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is no TOML: {error}", path=str(path)) from error
    except (ValueError, RecursionError) as error:  # limits of Python, not of TOML
        what = "has a number of thousands of digits, or nests too deeply; correct it"
        raise ConfigError(f"{path} {what}", path=str(path)) from error
    models = found.pop("models", None)
    if not isinstance(models, dict) or not models:
        what = f"{path} names no model; write [models.NAME] with path = ... for each"
        raise ConfigError(what, path=str(path))
    _check_fields(str(path), found, _DEFAULTS)
    return [_from_file(path, name, table, found) for name, table in models.items()]


def _from_file(path: Path, name: str, table: object, defaults: Mapping[str, Any]) -> Wanted:
    where = f"{path}, [models.{name}]"
    if not isinstance(table, dict) or not isinstance(table.get("path"), str):
        raise ConfigError(f"{where}: path is missing; say where its weights are", path=str(path))
    place = table["path"]
    local = path.parent / place
    if "://" not in place and local.exists():
        place = str(local)
    return wanted(where, name, {**defaults, **table, "path": place})


def wanted(where: str, name: str, given: Mapping[str, Any]) -> Wanted:
    """Return the model `name` with the fields in `given`, of which `path` is required.

    `where` is the origin of the fields, as errors name it.

    Raises:
        ConfigError: A field is unknown or has a wrong value.
    """
    _check_fields(where, given, _FIELDS)
    replicas = given.get("replicas", 1)
    if not isinstance(replicas, int) or isinstance(replicas, bool) or replicas < 1:
        what = f"{where}: replicas is {_shown(replicas)}; give a number of 1 or more"
        raise ConfigError(what, model=name)
    sizes = {field: _size(where, field, given.get(field, 0)) for field in ("room", "host")}
    return Wanted(name, given["path"], sizes["room"], sizes["host"], replicas)


def _check_fields(where: str, table: Mapping[str, Any], fields: tuple[str, ...]) -> None:
    for field in table:
        if field not in fields:
            near = perhaps(field, fields) or f"; there are {', '.join(fields)}"
            raise ConfigError(f"{where}: no field {field!r}{near}", field=field)


def _size(where: str, field: str, value: object) -> int:
    nbytes = parse_size(value)
    if nbytes is None:
        what = f'{where}: {field} is {_shown(value)}; write for example "4GiB", at most 1024TiB'
        raise ConfigError(what, field=field)
    return nbytes


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."

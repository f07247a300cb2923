"""Names of state dicts, and the keys under which clients publish them."""

import re
from typing import Final

from tensor_dedup.errors import ConfigError
from tensor_dedup.memory_manager.protocol.limits import MAX_NAME

_PREFIX: Final = "state-dict:"
_LONGEST: Final = MAX_NAME - len(_PREFIX)


def state_dict_key(name: str) -> str:
    """Return the key under which the state dict `name` is published.

    Raises:
        ConfigError: The name is not 1 to 117 visible ASCII characters without spaces, which is what
            a key of the protocol can have.
    """
    if not re.fullmatch(f"[!-~]{{1,{_LONGEST}}}", name):
        raise ConfigError(
            f"{name!r} cannot be the name of a state dict; give 1 to {_LONGEST} ASCII letters, "
            "digits or punctuation marks, without spaces",
            name=name,
        )
    return f"{_PREFIX}{name}"

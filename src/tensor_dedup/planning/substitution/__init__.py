"""Frozen-base substitution: chosen layers of a fine-tune are taken from its base, byte for byte.

Unlike the rest of this package, substitution changes what a model computes. So it runs only on
request, and the result is a new checkpoint whose metadata names the layers
(`tensor_dedup.formats.markers`).
"""

from tensor_dedup.errors import NotInstalledError
from tensor_dedup.suggestions import install_hint

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise NotInstalledError(
        f"comparing the numbers of tensors needs torch; {install_hint('torch')}", module="torch"
    ) from error

from tensor_dedup.planning.substitution.substitute import SubstitutedLayer, Substitution, substitute

__all__ = ["SubstitutedLayer", "Substitution", "substitute"]

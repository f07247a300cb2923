"""Frozen-base substitution: chosen layers of a fine-tune are taken from its base, byte for byte.

Unlike everything else in this package it changes what a model computes, so it happens only where it
is asked for, and into a new checkpoint that says so (`tensor_dedup.formats.markers`).
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

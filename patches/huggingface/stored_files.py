"""Replacements for the functions with which the frameworks read safetensors files.

A stored checkpoint is loaded from a stub folder, in which the weight files have only their headers.
The replacements take the tensors of these files from shared memory and the store. All other files
are read as usual.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from tensor_dedup.seams import Seam

if TYPE_CHECKING:
    import torch

    from tensor_dedup.loader.post_load.stored_weights import StoredWeights
    from tensor_dedup.patches.huggingface.transformers import Wrap

_TRANSFORMERS: Final = "transformers.modeling_utils"
_WITHOUT: Final = "store:// cannot be loaded: the frameworks read the stub of a file, and fail"

# A class that is compiled, without a signature in some versions.
OPEN_FILE: Final = Seam(
    f"{_TRANSFORMERS}:safe_open",
    _WITHOUT,
    "opens every safetensors file that Transformers loads; its slices are read later, in threads",
    versions=("transformers 5.19",),
)
LOAD_FILE: Final = Seam(
    "safetensors.torch:load_file",
    _WITHOUT,
    "reads every safetensors file that Diffusers loads",
    needs=("filename", "device"),
    versions=("safetensors 0.8",),
)


def replacements(stored: StoredWeights) -> Iterator[tuple[Seam, Wrap]]:
    """Yield pairs: a function that reads safetensors files, and the function that wraps it.

    A Seam names the function to replace. The wrappers read the files of the checkpoint `stored`,
    and leave all other files to the original function. Functions of frameworks that are not
    imported are left out.
    """

    def opens(original: Callable[..., Any]) -> Callable[..., Any]:
        def safe_open(filename: Any, *args: Any, **options: Any) -> Any:
            if not stored.holds(filename):
                return original(filename, *args, **options)
            device = args[1] if len(args) > 1 else options.get("device", "cpu")
            return StoredWeightsFile(stored, filename, device)

        return safe_open

    def loads(original: Callable[..., Any]) -> Callable[..., Any]:
        def load_file(filename: Any, device: Any = "cpu") -> Any:
            if not stored.holds(filename):
                return original(filename, device)
            file = StoredWeightsFile(stored, filename, device)
            names = file.keys()
            return {name: file.get_tensor(name) for name in names}

        return load_file

    if _TRANSFORMERS in sys.modules:
        yield OPEN_FILE, opens
    yield LOAD_FILE, loads


class StoredWeightsFile:
    """A safetensors file in the store, with the methods of `safetensors.safe_open`. Thread-safe."""

    def __init__(self, stored: StoredWeights, filename: Any, device: Any) -> None:
        self._stored, self._path, self._device = stored, filename, device
        self._file = stored.file(filename)

    def __enter__(self) -> StoredWeightsFile:
        return self

    def __exit__(self, *error: object) -> None:
        """Do nothing, because the load itself closes the store."""

    def keys(self) -> list[str]:
        """Return the names of the tensors, sorted."""
        return sorted(self._file.tensors)

    def metadata(self) -> dict[str, str]:
        """Return the metadata in the file's header."""
        return dict(getattr(self._file.header, "metadata", {}))

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return the tensor `name`, on the device that the file was opened for.

        Raises:
            KeyError: The file has no tensor of this name.
            StoreError: The tensor cannot be read, or is damaged.
        """
        found = self._stored.tensor(self._path, name)
        return found if str(self._device) == "cpu" else found.to(self._device)

    def get_slice(self, name: str) -> StoredWeightsSlice:
        """Return an object that reads the tensor `name` when it is indexed, as safetensors does.

        Raises:
            KeyError: The file has no tensor of this name.
        """
        return StoredWeightsSlice(self, name, self._file.tensors[name].spec)


class StoredWeightsSlice:
    """A tensor of a stored file, like a slice of safetensors: `tensor[...]` reads its data."""

    def __init__(self, file: StoredWeightsFile, name: str, spec: Any) -> None:
        self._file, self._name, self._spec = file, name, spec

    def get_shape(self) -> list[int]:
        """Return the shape of the tensor."""
        return list(self._spec.shape)

    def get_dtype(self) -> str:
        """Return the element type as safetensors names it, such as "BF16"."""
        return str(self._spec.dtype)

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Read the whole tensor, and return the part that `index` selects."""
        return self._file.get_tensor(self._name)[index]

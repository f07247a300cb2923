"""Publish a checkpoint's tensors in a memory manager under a name, and exit.

    python -m tensor_dedup.loader.checkpoint_io.preload --socket SOCKET --name NAME CHECKPOINT

This command runs in a process of its own, because the manager never loads torch. Each tensor is
published under its name in the file. If the file lies in a subfolder, the name of the subfolder
precedes that of the tensor ("unet/conv_in.weight"). The tensors stay pinned until `tensor-dedup
unpin NAME`.
"""

import sys
from pathlib import Path

import click
import torch
from safetensors.torch import load_file

from tensor_dedup.errors import TensorDedupError, UnsupportedError
from tensor_dedup.formats.checkpoint import open_checkpoint
from tensor_dedup.memory_manager import connect
from tensor_dedup.memory_manager.client.admin import Admin
from tensor_dedup.store.reading.tensors import load_tensors
from tensor_dedup.store.store import LocalStore
from tensor_dedup.types import STORE_SCHEME


def publish(checkpoint: str, name: str, socket: str) -> str:
    """Publish a checkpoint's tensors as `name` in the memory manager at `socket`, and pin them.

    `checkpoint` is a path or `store://NAME`. Returns a summary of one line for the user.

    Raises:
        TensorDedupError: The checkpoint cannot be read, or the manager refuses its tensors.
    """
    with connect(socket, name=f"preload {name}") as shared, Admin(socket) as admin:
        done = shared.put(name, _alone(_tensors(checkpoint)))
        admin.pin(name)
    return f"{checkpoint}: {done.tensors} tensors, {done.nbytes} bytes published as {name}"


def _tensors(checkpoint: str) -> dict[str, torch.Tensor]:
    if checkpoint.startswith(STORE_SCHEME):
        with (
            LocalStore.open() as store,
            store.checkpoint(checkpoint.removeprefix(STORE_SCHEME)) as stored,
        ):
            # Mapped, so that there is no second copy in memory. The store verifies it here; it is
            # hashed again when it is put, and has the digest of the bytes that the manager got.
            return load_tensors(stored, mapped=True)
    found: dict[str, torch.Tensor] = {}
    for file in open_checkpoint(Path(checkpoint)).files:
        if file.path.suffix != ".safetensors":
            raise UnsupportedError(
                f"{file.path}: only safetensors are published from files; import the checkpoint "
                "into the store, and preload it as store://NAME",
                path=str(file.path),
            )
        held = load_file(file.path)
        found |= {file.prefix + spec.name: held[spec.name] for spec in file.tensors}
    return found


def _alone(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Give each tensor a storage of its own, so that it is one with its equals of other files.

    Readers lay many into one region, and `put` publishes whole storages. Names that are the same
    tensor stay so.
    """
    single: dict[tuple[object, ...], torch.Tensor] = {}
    found = {}
    for name, tensor in tensors.items():
        place = tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
        if not tensor.numel() or place not in single:
            single[place] = _storage_of_its_own(tensor)
        found[name] = single[place]
    return found


def _storage_of_its_own(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor where it lies, as the whole of a storage; a copy if its bytes are no plain run."""
    if not tensor.numel() or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return tensor.clone()
    held = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return torch.frombuffer(held, dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)


@click.command()
@click.option("--socket", required=True)
@click.option("--name", required=True)
@click.argument("checkpoint")
def main(socket: str, name: str, checkpoint: str) -> None:
    """Publish the tensors of CHECKPOINT as NAME in the memory manager at SOCKET."""
    try:
        sys.stderr.write(publish(checkpoint, name, socket) + "\n")
    except (TensorDedupError, OSError) as error:
        raise SystemExit(f"{checkpoint}: not preloaded: {error}") from error


if __name__ == "__main__":
    main()

"""Hash tensors that lie on a GPU, as they pass through page-locked buffers.

No copy of such a tensor is made in host memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tensor_dedup.loader.cuda.transfers import awaited

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from tensor_dedup.loader.cuda.gpu import Gpu
    from tensor_dedup.loader.cuda.transfers import HostContent


def hash_on_gpu(gpu: Gpu, tensors: Sequence[torch.Tensor]) -> list[HostContent]:
    """Return the digests and leaf digests of gap-free tensors on `gpu`, by BLAKE3, in order.

    What writes to the tensors must have ended: wait for it first. All tensors are on their way at
    the same time.

    Raises:
        BackendError: The driver refuses.
    """
    with awaited() as begun:
        for each in tensors:
            begun.append(gpu.transfers.download(each.data_ptr(), each.nbytes, hashed=True))
    return [transfer.content for transfer in begun]

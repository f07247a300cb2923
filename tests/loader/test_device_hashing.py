"""The digest of a tensor is that of its bytes in the order of memory, wherever it lies."""

import pytest
import torch

from tensor_dedup.digest import LEAF_BYTES, digest
from tensor_dedup.errors import ConfigError, UnsupportedError
from tensor_dedup.loader.residents.resident import digest_of, tensor_bytes


def weights(nbytes: int = LEAF_BYTES + 2) -> torch.Tensor:
    made = torch.Generator().manual_seed(nbytes)
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=made)


def expected(tensor: torch.Tensor) -> str:
    return digest(tensor_bytes(tensor))


@pytest.mark.parametrize(
    "tensor",
    [
        weights(0),
        weights(1),
        weights(),
        weights()[3:],
        weights().view(torch.bfloat16)[5:],
        weights(4096).view(torch.float32).view(32, 32).T,
        weights(4096).view(torch.int64).view(4, 8, 16).permute(2, 0, 1),
        weights(4096).view(torch.float8_e4m3fn).view(64, 64).T,
        torch.nn.Parameter(weights(64).view(torch.complex64), requires_grad=True),
        torch.tensor([True, False]),
    ],
)
def test_the_digest_is_the_one_of_the_bytes_in_the_order_of_memory(tensor: torch.Tensor) -> None:
    assert digest_of(tensor) == expected(tensor)


def test_what_the_host_hashes() -> None:
    for algorithm in ("blake2b", "xxh3_128", "xxhash64"):
        assert digest_of(weights(), algorithm) == digest(tensor_bytes(weights()), algorithm)
    with pytest.raises(ConfigError):
        digest_of(weights(), "md5")
    with pytest.raises(UnsupportedError):
        digest_of(weights()[::2])

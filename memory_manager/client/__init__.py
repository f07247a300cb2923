"""The client of a memory manager for engines: small, blocking, without torch.

from tensor_dedup.memory_manager.client import NewLayer, NewTensor, connect

client = connect("auto", name="vllm base")
found = client.get(keys, checkpoint="base")
made = client.put({key: NewLayer(record, (NewTensor(len(data), digest, data),))}, "base")
"""

from tensor_dedup.memory_manager.client.client import AUTO, Client, LayerFound, connect
from tensor_dedup.memory_manager.client.leases import Lease, SharedSlab
from tensor_dedup.memory_manager.client.puts import (
    Fill,
    NewLayer,
    NewTensor,
    Put,
    PutLayer,
    PutResult,
    Reservation,
    TensorSlot,
)

__all__ = [
    "AUTO",
    "Client",
    "Fill",
    "LayerFound",
    "Lease",
    "NewLayer",
    "NewTensor",
    "Put",
    "PutLayer",
    "PutResult",
    "Reservation",
    "SharedSlab",
    "TensorSlot",
    "connect",
]

"""How an engine uses a memory manager: small, blocking, without torch.

from tensor_dedup.memory_manager.client import connect

client = connect("auto", name="vllm base")
hits = client.lookup([key], checkpoint="base")
"""

from tensor_dedup.memory_manager.client.client import AUTO, Client, LayerFound, connect
from tensor_dedup.memory_manager.client.leases import Lease, SharedSlab
from tensor_dedup.memory_manager.client.puts import Put, Reservation

__all__ = ["AUTO", "Client", "LayerFound", "Lease", "Put", "Reservation", "SharedSlab", "connect"]

"""How much memory of a GPU is in use, and by which processes, as NVIDIA's NVML counts it.

Optional: without the package nvidia-ml-py, the library or the right to ask, it says why instead.
Nothing of it makes a context, or is loaded before somebody asks.
"""

import importlib
from typing import Any, Final

import msgspec

_MODULE: Final = "pynvml"  # what nvidia-ml-py is imported as


class ProcessUse(msgspec.Struct, frozen=True):
    """What a process has of a GPU, in bytes; None where the library does not say, as in containers.

    Memory that several processes map counts for the one that made it, if that still has it open.
    """

    pid: int
    nbytes: int | None


class DeviceUse(msgspec.Struct, frozen=True):
    """A GPU's memory in bytes, and the processes with a context on it, by pid."""

    uuid: str
    name: str
    total: int
    used: int
    processes: list[ProcessUse]

    def of(self, pid: int) -> ProcessUse | None:
        """What that process has; None when it has no context on this GPU."""
        return next((each for each in self.processes if each.pid == pid), None)

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found


class NotAvailable(msgspec.Struct, frozen=True):
    """Why nobody can say."""

    reason: str

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {"not_available": self.reason}


def use_of(uuid: str, api: Any = None) -> DeviceUse | NotAvailable:
    """The memory of a GPU, by its UUID. `api`: pynvml, or what stands for it."""
    if api is None:
        try:
            api = importlib.import_module(_MODULE)
        except ImportError as error:
            return NotAvailable(f"{error}; `pip install nvidia-ml-py` for what NVML counts")
    try:
        api.nvmlInit()
    except api.NVMLError as error:
        return NotAvailable(f"NVML cannot be used ({error}); is NVIDIA's driver installed here?")
    try:
        return _ask(api, uuid)
    except api.NVMLError as error:
        return NotAvailable(f"NVML does not tell of {uuid}: {error}")
    finally:
        api.nvmlShutdown()


def _ask(api: Any, uuid: str) -> DeviceUse:
    handle = api.nvmlDeviceGetHandleByUUID(uuid)
    memory = api.nvmlDeviceGetMemoryInfo(handle)
    name = api.nvmlDeviceGetName(handle)
    found = api.nvmlDeviceGetComputeRunningProcesses(handle)
    processes = [ProcessUse(int(each.pid), _nbytes(each.usedGpuMemory)) for each in found]
    return DeviceUse(
        uuid,
        name.decode() if isinstance(name, bytes) else str(name),
        int(memory.total),
        int(memory.used),
        sorted(processes, key=lambda each: each.pid),
    )


def _nbytes(value: Any) -> int | None:
    return None if value is None else int(value)

"""The memory in use on a GPU, and the processes that use it, as NVIDIA's NVML reports them.

NVML is optional. If the package nvidia-ml-py, the library or a permission is missing, the result of
a query has the reason. NVML is loaded by the first query, and no query creates a CUDA context.
"""

import importlib
from typing import Any, Final

import msgspec

_MODULE: Final = "pynvml"  # what nvidia-ml-py is imported as


class ProcessUse(msgspec.Struct, frozen=True):
    """The GPU memory of one process in bytes, or None if NVML does not report it.

    In containers, NVML often reports no sizes. For which process NVML counts memory that several
    map was not looked at on a GPU.
    """

    pid: int
    nbytes: int | None


class DeviceUse(msgspec.Struct, frozen=True):
    """The memory of a GPU in bytes, and the processes that have a CUDA context there."""

    uuid: str
    name: str
    total: int
    used: int
    processes: list[ProcessUse]

    def of(self, pid: int) -> ProcessUse | None:
        """Return what the process `pid` uses, or None if it has no CUDA context on this GPU."""
        return next((each for each in self.processes if each.pid == pid), None)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a dict that can be encoded as JSON."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found


class NotAvailable(msgspec.Struct, frozen=True):
    """The reason why the memory use of a GPU is not known."""

    reason: str

    def to_dict(self) -> dict[str, Any]:
        """Return the reason as a dict that can be encoded as JSON."""
        return {"not_available": self.reason}


def use_of(uuid: str, api: Any = None) -> DeviceUse | NotAvailable:
    """Return the memory use of the GPU with this UUID, or the reason why it is not known.

    `api` is the module pynvml or a substitute; by default pynvml is imported.
    """
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

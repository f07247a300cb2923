"""A process of the tests on a GPU that uses what a manager lends; `answers` tells it what to do."""

import faulthandler
from typing import Any

import torch

from gpu_runs import answers, gpu_world
from gpu_runs.gpu_world import Load, wait_for_gpu, weights

STATE: dict[str, Any] = {}


def connect(socket: str) -> None:
    """A connection, a context, and what torch itself takes, before anything is shared."""
    STATE["load"] = Load(socket)
    x = torch.ones(64, 1024, device=gpu_world.PLACE)
    STATE["input"] = x
    x @ torch.ones(1024, 1024, device=gpu_world.PLACE)
    float(x.sum())
    wait_for_gpu()


def put(seeds: list[int], side: int = 1024) -> None:
    """Make these resident."""
    STATE["load"].put(*[weights(seed, side) for seed in seeds])


def attach(seeds: list[int], side: int = 1024) -> None:
    """See these residents as tensors."""
    STATE["tensors"] = [STATE["load"].find(weights(seed, side)) for seed in seeds]


def forward(index: int = 0) -> list[float]:
    """The first numbers of a product with a shared matrix."""
    y = STATE["input"] @ STATE["tensors"][index]
    wait_for_gpu()
    return [round(float(number), 4) for number in y[0, :8]]


def read_all() -> float:
    """Touch every byte, and keep no memory for it: another dtype would be a copy of them all."""
    total = sum(float(each.sum()) for each in STATE["tensors"])
    torch.cuda.empty_cache()
    return total


def write() -> str:
    """A kernel that writes to a shared page: it ends this process's use of the GPU."""
    faulthandler.disable()
    STATE["tensors"][0].fill_(0)
    wait_for_gpu()
    return "it was written"


def copy_over() -> str:
    """A copy by the driver to a shared page."""
    faulthandler.disable()
    gpu, zeros = STATE["load"].gpu, torch.zeros(16)
    with gpu.entered():
        gpu.driver.copy_in(STATE["tensors"][0].data_ptr(), zeros.data_ptr(), zeros.nbytes)
        gpu.driver.synchronize()
    return "it was written"


def compiled() -> list[float]:
    """A compiled product with a shared matrix."""
    product = torch.compile(lambda x, w: x @ w)
    y = product(STATE["input"], STATE["tensors"][0])
    wait_for_gpu()
    return [round(float(number), 4) for number in y[0, :8]]


def reconnect() -> int:
    """Offer what is held to the manager that is there now."""
    return int(STATE["load"].client.reconnect())


def let_go() -> int:
    """Drop the tensors, and unmap what they lay in; how much is left."""
    STATE["tensors"] = []
    wait_for_gpu()
    return int(STATE["load"].gpu.reap(wait=True))


if __name__ == "__main__":
    answers.serve(globals())

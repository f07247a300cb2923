"""A real training, small and the same on every machine's every run: what it does depends on its
state alone.
"""

from typing import Any

import torch
from torch import nn

from tensor_dedup import Store
from tensor_dedup.store.files import Files
from tensor_dedup.training import CheckpointStore

_BATCH, _INPUTS, _WIDTH, _CLASSES = 16, 64, 320, 8


class Training:
    """A network whose first layer is frozen, batch norm in train mode, dropout, AdamW."""

    def __init__(self) -> None:
        torch.manual_seed(11)
        frozen = nn.Linear(_INPUTS, _WIDTH).requires_grad_(False)
        norm, drop = nn.BatchNorm1d(_WIDTH), nn.Dropout(0.2)
        middle = nn.Linear(_WIDTH, _WIDTH)
        self.model = nn.Sequential(
            frozen, norm, nn.ReLU(), drop, middle, nn.ReLU(), nn.Linear(_WIDTH, _CLASSES)
        )
        moving = [each for each in self.model.parameters() if each.requires_grad]
        self.optimizer = torch.optim.AdamW(moving, lr=1e-3)
        self.generator = torch.Generator().manual_seed(5)
        self.losses: list[float] = []

    @property
    def state(self) -> dict[str, Any]:
        """All that the next step depends on."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "generator": self.generator,
            "losses": self.losses,
        }

    def begin(self) -> torch.Tensor:
        """Forward and backward of the next step; its loss. Statistics change here."""
        x = torch.randn(_BATCH, _INPUTS, generator=self.generator)
        classes = torch.randint(_CLASSES, (_BATCH,), generator=self.generator)
        torch.manual_seed(len(self.losses))  # dropout's
        loss = nn.functional.cross_entropy(self.model(x), classes)
        self.optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def step(self) -> float:
        """A whole step."""
        loss = float(self.begin())
        self.optimizer.step()
        self.losses.append(loss)
        return loss

    def resume(self, run: CheckpointStore) -> int:
        """Go on from the latest step, if there is one; the number of the next."""
        latest = run.latest()
        if latest is None:
            return 0
        self.losses[:] = run.load(latest, self.state)["losses"]
        return latest + 1


def train(root: str, steps: int, files: Files | None = None) -> list[float]:
    """Train until there are so many steps, each saved in the background; all losses."""
    training, store = Training(), Store.open(root, files=files)
    with CheckpointStore(store, "run", keep_last=3, keep_every=10) as run:
        run.hook(training.optimizer)
        for step in range(training.resume(run), steps):
            loss = training.step()
            run.save_async(training.state, step, {"loss": loss})
            if step % 50 == 49:
                run.gc(0)
    return training.losses


def uninterrupted(steps: int) -> list[float]:
    """The losses of a training that saves nothing and that nobody kills."""
    training = Training()
    return [training.step() for _ in range(steps)]

"""The models whose checkpoints are compared, and how each is trained a little further."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

CLASSES: Final = 10
Part = Literal["full", "frozen", "LoRA-like"]


class _Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    def __init__(self, inward: int, outward: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inward, outward, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outward)
        self.conv2 = nn.Conv2d(outward, outward, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outward)
        if stride != 1 or inward != outward:
            self.downsample: nn.Module = nn.Sequential(
                nn.Conv2d(inward, outward, 1, stride, bias=False), nn.BatchNorm2d(outward)
            )
        else:
            self.downsample = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        inner = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(inner + self.downsample(x))


class ResNet18(nn.Module):
    """ResNet-18 with the 122 tensors, names and shapes of torchvision's, for 10 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        widths = (64, 64, 128, 256, 512)
        for number, (inward, outward) in enumerate(pairwise(widths), 1):
            first = _Block(inward, outward, 1 if number == 1 else 2)
            setattr(self, f"layer{number}", nn.Sequential(first, _Block(outward, outward, 1)))
        self.fc = nn.Linear(512, CLASSES)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def features(self, x: Tensor) -> Tensor:
        """What the head sees of images (n, 3, height, width): (n, 512)."""
        x = nn.functional.max_pool2d(torch.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        for number in range(1, 5):
            x = getattr(self, f"layer{number}")(x)
        return x.mean((2, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.fc(self.features(x))
        return out


def images(seed: int, count: int = 64) -> tuple[Tensor, Tensor]:
    """Made images (count, 3, 32, 32): a pattern for each class under noise; and their classes."""
    dice = torch.Generator().manual_seed(seed)
    patterns = torch.randn(CLASSES, 3, 32, 32, generator=torch.Generator().manual_seed(7))
    classes = torch.randint(CLASSES, (count,), generator=dice)
    return patterns[classes] + torch.randn(count, 3, 32, 32, generator=dice), classes


def pretrained() -> ResNet18:
    """The base of all fine-tunes: trained a little, so that its statistics are real. A copy."""
    return deepcopy(_pretrained())


@cache
def _pretrained() -> ResNet18:
    torch.manual_seed(0)
    model = ResNet18()
    train(model, [*model.parameters()], torch.optim.AdamW, 1e-3, 4, seed=0)
    return model


def train(
    model: nn.Module,
    parameters: list[nn.Parameter],
    optimizer: Callable[..., torch.optim.Optimizer],
    rate: float,
    steps: int,
    seed: int,
) -> None:
    """Some steps of ordinary training in train mode; only `parameters` move, and statistics."""
    model.train()
    stepper = optimizer(parameters, lr=rate)
    for step in range(steps):
        x, classes = images(seed * 1000 + step, 32)
        stepper.zero_grad()
        _backward(nn.functional.cross_entropy(model(x), classes))
        stepper.step()


@dataclass
class Head:
    """Fine-tuning of the last layer of a frozen network that is in eval mode."""

    model: ResNet18
    rate: float
    seed: int

    def epochs(self, count: int) -> Iterator[ResNet18]:
        """The model after each epoch; always the same object."""
        self.model.eval()
        torch.manual_seed(self.seed)
        self.model.fc.reset_parameters()
        with torch.no_grad():
            x, classes = images(1)
            seen = self.model.features(x)
        stepper = torch.optim.SGD(self.model.fc.parameters(), lr=self.rate, momentum=0.9)
        for _ in range(count):
            for batch in torch.split(torch.randperm(len(seen)), 16):
                stepper.zero_grad()
                _backward(nn.functional.cross_entropy(self.model.fc(seen[batch]), classes[batch]))
                stepper.step()
            yield self.model


def _backward(loss: Tensor) -> None:
    torch.autograd.backward(loss)


def nudge(model: ResNet18, part: Part) -> None:
    """A step of an optimizer that moves this part: what a save finds changed."""
    moved = [*(model if part == "full" else model.fc).parameters()]
    if part == "LoRA-like":
        last = model.get_submodule("layer4.1.conv2")
        moved += [*last.parameters()]
    with torch.no_grad():
        for parameter in moved:
            parameter.add_(torch.randn_like(parameter), alpha=1e-4)


def perceptron(width: int, layers: int) -> nn.Sequential:
    """A multi-layer perceptron of `layers` hidden layers of this width."""
    parts: list[nn.Module] = []
    for number in range(layers):
        parts += [nn.Linear(64 if number == 0 else width, width), nn.ReLU()]
    return nn.Sequential(*parts, nn.Linear(width, CLASSES))


def half_frozen() -> tuple[nn.Sequential, nn.Module]:
    """A perceptron of 0.5 MB, and its second half, which is the one that is trained."""
    torch.manual_seed(3)
    back = nn.Sequential(nn.Linear(256, 256), nn.ReLU())
    head = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, CLASSES))
    back.requires_grad_(False)
    return nn.Sequential(back, head), head


def shaken(module: nn.Module, steps: int) -> Iterator[None]:
    """Some steps of Adam on made data for a module with 256 inputs."""
    x, classes = torch.randn(64, 256), torch.randint(CLASSES, (64,))
    stepper = torch.optim.Adam(module.parameters(), 1e-3)
    for _ in range(steps):
        stepper.zero_grad()
        _backward(nn.functional.cross_entropy(module(x), classes))
        stepper.step()
        yield


def table(rows: int = 1000, columns: int = 20) -> tuple[Any, Any]:
    """Made data for trees."""
    import numpy as np

    dice = np.random.default_rng(5)
    x = dice.standard_normal((rows, columns))
    noise = dice.standard_normal(rows) * 0.3
    return x, (x[:, 0] * x[:, 1] + np.sin(x[:, 2]) + noise > 0).astype(int)


class Forest:
    """scikit-learn's gradient boosting, grown by warm start."""

    def __init__(self, trees: int) -> None:
        from sklearn.ensemble import GradientBoostingClassifier

        self.model = GradientBoostingClassifier(
            n_estimators=trees, max_depth=3, warm_start=True, random_state=0
        )
        self._data = table()
        self.model.fit(*self._data)

    def grow(self, trees: int) -> Any:
        """The same object with more trees."""
        self.model.n_estimators += trees
        return self.model.fit(*self._data)


class Rounds:
    """An XGBoost booster, grown round by round."""

    def __init__(self, rounds: int) -> None:
        import xgboost

        x, y = table()
        self._data = xgboost.DMatrix(x, y)
        options = {"objective": "binary:logistic", "max_depth": 3, "nthread": 2, "seed": 0}
        self.model = xgboost.train(options, self._data, rounds)

    def grow(self, rounds: int) -> Any:
        """The same object with more rounds."""
        for _ in range(rounds):
            self.model.update(self._data, self.model.num_boosted_rounds())
        return self.model

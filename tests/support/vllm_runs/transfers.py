"""Weight updates over vLLM's transfer API, by engines that need no GPU: they read files.

Those of vLLM itself move weights between GPUs. Import it before an engine is made with
`weight_transfer_config={"backend": "files"}` or "patches".
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from models import tiny_checkpoints as checkpoints


@dataclass
class Begin(WeightTransferInitInfo):
    """There is nothing to agree on."""


@dataclass
class Update(WeightTransferUpdateInfo):
    """A checkpoint, and those of its tensors that are sent this time."""

    path: str
    names: list[str] = field(default_factory=list)

    def tensors(self) -> dict[str, torch.Tensor]:
        held = checkpoints.tensors(Path(self.path))
        return {name: held[name] for name in self.names}


class Reading(WeightTransferEngine[Begin, Update]):
    """What both have in common."""

    init_info_cls = Begin
    update_info_cls = Update

    def init_transfer_engine(self, init_info: Begin) -> None:
        self.begun = init_info

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Without what vLLM does then, which is to wait for a GPU."""
        self.receive_weights(self.parse_update_info(update_info))

    def shutdown(self) -> None:
        """Nothing is open."""


class Files(Reading):
    """Weights as a checkpoint has them, layer by layer, as vLLM's own engines load them."""

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Update) -> None:
        model: Any = self.model
        model.load_weights(iter(update_info.tensors().items()))

    def finish_weight_update(self) -> None:
        finish: Any = finalize_layerwise_reload  # not annotated
        finish(self.model, self.model_config)


class Patches(Reading):
    """Parameters by the names they have in the model, written where they are."""

    def start_weight_update(self) -> None:
        """In place, so there is nothing to prepare."""

    def receive_weights(self, update_info: Update) -> None:
        for name, tensor in update_info.tensors().items():
            self.model.get_parameter(name).data.copy_(tensor)

    def finish_weight_update(self) -> None:
        """All is written."""


for _name, _engine in {"files": Files, "patches": Patches}.items():
    WeightTransferEngineFactory.register_engine(_name, _engine)

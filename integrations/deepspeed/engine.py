"""DeepSpeed's checkpoint engine over the store.

DeepSpeed names files, and looks for them on the disk. All that is saved under one file name, in
whatever folder, is a run here. Its steps are counted as they are saved, whatever their tags say:
tags of one number, and folders, do not get in each other's way. What lies under the file's name on
the disk says which step is meant.
"""

import json
from pathlib import Path
from typing import Any, Final

from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine

from tensor_dedup.store.checkpoints import CheckpointStore
from tensor_dedup.store.checkpoints.errors import UnknownStepError
from tensor_dedup.store.checkpoints.step_names import parse
from tensor_dedup.store.store import Store

_TITLE: Final = "tensor-dedup step"
_LONGEST: Final = 4096


class StoreEngine(CheckpointEngine):  # type: ignore[misc]  # where DeepSpeed is not installed
    """Saves are durable when they return; files that DeepSpeed itself wrote are read as ever.

    No save replaces a step: of a file that is saved again, the step it stood for stays in the
    store. Processes that save at one moment get steps of their own.
    """

    def __init__(self, config_params: Any, store: str, run: str) -> None:
        """NotAStoreError, BadNameError."""
        super().__init__(config_params)
        self.name = "StoreEngine"
        self._store, self._run = Store.open(store), run
        self._runs: dict[str, CheckpointStore] = {}
        self._others = TorchCheckpointEngine(config_params)

    def create(self, info: Any) -> None:
        """A checkpoint begins."""

    def save(self, state_dict: Any, path: str) -> None:
        """Save what belongs into a file, and leave there where it is. StoreError, StateError."""
        saved = self._of(Path(path).stem).append(dict(state_dict))
        target = Path(path)
        part = target.with_name(f".{target.name}.part")
        part.write_text(json.dumps([_TITLE, saved.name, saved.manifest]))
        part.replace(target)

    def load(self, path: str, map_location: Any = None) -> Any:
        """The state a file stands for, on the CPU.

        UnknownStepError: the step was deleted or replaced since; CorruptTensorError.
        """
        found = _pointer(Path(path))
        if found is None:
            return self._others.load(path, map_location)
        name, manifest = found
        step = parse(name)
        if step is None or self._store.objects.ref(name) != manifest:
            raise UnknownStepError.at(path, f"{name} is not what it was when this was saved")
        return CheckpointStore(self._store, step.run).load(step.step)

    def commit(self, info: Any) -> bool:
        """All of a rank's files are durable already."""
        return True

    def preserves_storage_sharing(self) -> bool:
        """Views are saved as they are, without the rest of their storage: no copies are needed."""
        return False

    def cleanup(self) -> None:
        """Let go of what is held between saves."""
        for run in self._runs.values():
            run.close()

    def _of(self, file: str) -> CheckpointStore:
        if file not in self._runs:
            self._runs[file] = CheckpointStore(self._store, f"{self._run}/{file}")
        return self._runs[file]


def _pointer(path: Path) -> tuple[str, str] | None:
    """The step that a file names, and its manifest; None: it is a file of DeepSpeed's."""
    with path.open("rb") as file:
        blob = file.read(_LONGEST)
    if not blob.startswith(f'["{_TITLE}", '.encode()):
        return None
    _, name, manifest = json.loads(blob)
    return name, manifest

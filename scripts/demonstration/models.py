"""The demonstration's checkpoints: a base of Qwen2-0.5B shapes and three fine-tunes of it.

Random weights from a fixed seed, bfloat16, about 1 GB each. They are made once: written under a
temporary name and renamed, so a folder that exists is complete.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import platformdirs

from tensor_dedup.errors import UnsupportedError
from tensor_dedup.text_table import human

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

BASE = "base"
LAYERS = 24
CHANGED_LAYER = 12
NEW_ROWS = 256
CONFIG: Mapping[str, Any] = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151_936,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
# A little more than the largest of them: files, configuration, and rounding of the file system.
_CHECKPOINT_BYTES = 1_000_000_000
_SPARE_BYTES = 200_000_000


def default_folder() -> Path:
    """Where the checkpoints are kept: in the user's cache directory."""
    # Another number for other content: what an older version made is not taken for ours.
    return Path(platformdirs.user_cache_dir("tensor-dedup")) / "demo-1"


def results(work: Path) -> Path:
    """The folder of logs and pictures, which a shell's `work/*` leaves out: that is checkpoints."""
    folder = work / ".results"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def paths(work: Path) -> list[Path]:
    """The folder of each checkpoint, in the order of loading."""
    return [work / name for name in MAKERS]


def missing(work: Path) -> list[str]:
    """Names of the checkpoints that are still to be made."""
    return [name for name in MAKERS if not (work / name).is_dir()]


def check_space(work: Path, names: list[str], *, each: int = _CHECKPOINT_BYTES) -> None:
    """UnsupportedError when the disk cannot hold the checkpoints of these names."""
    needed = len(names) * each + _SPARE_BYTES if names else 0
    work.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(work).free
    if free < needed:
        raise UnsupportedError(
            f"{work}: {human(needed)} are needed for {len(names)} checkpoints, {human(free)} are "
            "free; make room, or name another folder with --work",
            needed=needed,
            free=free,
        )


def make(name: str, work: Path) -> None:
    """Make one checkpoint; the base must be there for the others. Loads torch and transformers."""
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    MAKERS[name](work)


def _make_base(work: Path) -> None:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(1)
    torch.set_default_dtype(torch.bfloat16)
    build: Any = Qwen2ForCausalLM
    model = build(Qwen2Config(**CONFIG))
    torch.set_default_dtype(torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Untrained weights are so small that a tied model repeats its last token whatever its
            # layers say; larger ones make every token depend on every layer.
            # Untrained biases are all 0 and norms all 1, and would share where nothing should.
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.05)
            elif ".layers." in name:
                parameter.mul_(2.5)
    _save(model, work / BASE)


def _make_one_layer(work: Path) -> None:
    import torch

    torch.manual_seed(2)
    model = _load(work / BASE)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if f".layers.{CHANGED_LAYER}." in name:
                _disturb(parameter)
    _save(model, work / "one-layer")


def _make_lora(work: Path) -> None:
    import peft
    import torch

    torch.manual_seed(3)
    config = peft.LoraConfig(
        r=16,
        lora_alpha=32,
        target_modules=["q_proj", "v_proj"],
        layers_to_transform=list(range(LAYERS // 2, LAYERS)),
        init_lora_weights=False,  # as after training: the default merges into nothing
    )
    adapted: Any = peft.get_peft_model(_load(work / BASE), config)
    _save(adapted.merge_and_unload(), work / "merged-lora")


def _make_grown(work: Path) -> None:
    import torch

    torch.manual_seed(4)
    model = _load(work / BASE)
    model.resize_token_embeddings(CONFIG["vocab_size"] + NEW_ROWS, mean_resizing=False)
    _save(model, work / "grown-vocabulary")


# In the order of loading, the base first: the others are made from it.
MAKERS: Mapping[str, Callable[[Path], None]] = {
    BASE: _make_base,
    "one-layer": _make_one_layer,
    "merged-lora": _make_lora,
    "grown-vocabulary": _make_grown,
}


def _disturb(parameter: "torch.Tensor") -> None:
    import torch

    parameter.mul_(1 + 0.1 * torch.randn_like(parameter)).add_(0.01)


def _load(path: Path) -> "PreTrainedModel":
    import torch
    from transformers import AutoModelForCausalLM

    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    return model


def _save(model: "PreTrainedModel", target: Path) -> None:
    with published(target) as folder:
        model.save_pretrained(folder)


@contextmanager
def published(target: Path) -> Iterator[Path]:
    """A new folder that gets its name when it is complete."""
    folder = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    try:
        yield folder
        folder.chmod(0o755)
        os.rename(folder, target)  # noqa: PTH104 (fails where another run was quicker)
    except FileExistsError:
        pass
    finally:
        shutil.rmtree(folder, ignore_errors=True)

"""Recognises files that each process of a job wrote a part of a model to, and says what to do.

Such files have the same tensors' names for different bytes, so none of them is the model, and
leaving one out loses a part of it. The tool that wrote them can put them together. No I/O.

    PyTorch DCP                 .metadata, __0_0.distcp, __1_0.distcp
    its Hugging Face writer     shard-00001-model-00001-of-00001.safetensors
    DeepSpeed                   mp_rank_00_model_states.pt
                                zero_pp_rank_0_mp_rank_00_optim_states.pt
    vLLM, sharded_state         model-rank-0-part-0.safetensors
    Meta                        consolidated.00.pth
    DeepSeek                    model0-mp8.safetensors
    TensorRT-LLM and others     rank0.safetensors, model_tp_rank_0.pt
    FSDP, one file a process    model_world_size_2_rank_0.pt
"""

import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tensor_dedup.errors import UnsupportedError
from tensor_dedup.formats.safetensors import SafetensorsHeader
from tensor_dedup.formats.weight_choice import DISTRIBUTED, shards_of
from tensor_dedup.formats.weights import Header

# The sub-folder of the slices where DCP's writer has put them together in the folder itself.
SLICES_FOLDER: Final = "sharded"

_DCP_METADATA: Final = ".metadata"
_OPTIMIZER: Final = "optimizer"
_SLICES: Final = "DCP_SHARDING_INFO"
_OFFSETS: Final = "saved_offsets"
_SLICE_FILE = re.compile(r"shard-(?P<rank>\d+)-model-\d+-of-\d+\.safetensors")
_SHOWN: Final = 3


@dataclass(frozen=True, slots=True)
class _Layout:
    """How a tool names such files, and what to do.

    `part` in the pattern differs from process to process. In the advice, FOLDER is the files'
    folder, and PARENT the one above it.
    """

    files: re.Pattern[str]
    what: str
    advice: str

    def advised(self, folder: Path) -> str:
        """Return what to do about files in `folder`."""
        advice = self.advice.replace("FOLDER", shlex.quote(str(folder)))
        return advice.replace("PARENT", shlex.quote(str(folder.parent)))


_LAYOUTS: Final = (
    _Layout(
        re.compile(r"(?P<part>.*\d[-_](model|optim)_states)\.pt"),
        "of a training with DeepSpeed",
        "where ZeRO was used, DeepSpeed's own script makes one model of them: `python "
        "PARENT/zero_to_fp32.py PARENT OUT --safe_serialization`, then give OUT; to save "
        "into a store from the start, see tensor_dedup.integrations.deepspeed "
        "(docs/howto/deepspeed.md)",
    ),
    _Layout(
        re.compile(r"model-rank-(?P<part>\d+)-part-\d+\.safetensors"),
        "of vLLM's load format sharded_state",
        "only an engine with as many processes reads them: give the model that they were made of",
    ),
    _Layout(
        re.compile(r"model_world_size_\d+_rank_(?P<part>\d+)\.pt"),
        "of a training with FSDP",
        "put them together with the tool that wrote them (verl: `python -m verl.model_merger merge "
        "--backend fsdp --local_dir FOLDER --target_dir OUT`), then give OUT",
    ),
    _Layout(
        re.compile(r"consolidated\.(?P<part>\d+)\.pth"),
        "of Meta's own layout of a model",
        "give the same model in Hugging Face's layout: often the folder above, or what "
        "Transformers' convert_llama_weights_to_hf.py makes of FOLDER",
    ),
    _Layout(
        re.compile(r"model(?P<part>\d+)-mp\d+\.safetensors"),
        "of DeepSeek's own inference code",
        "give the model that its convert.py was given",
    ),
)
# Names of many tools. Stages of a pipeline may be called so, too, and are one model as they are.
_PROCESS: Final = _Layout(
    re.compile(
        r"(rank|(.*[-_.])?(tp|mp|pp|ep|dp)[-_]?(rank[-_]?)?)(?P<part>\d+)(\D.*)?"
        r"\.(safetensors|bin|pt|pth|ckpt)"
    ),
    "of a job of several processes",
    "put them together with the tool that wrote them, and give the result",
)


def refuse_parts(folder: Path, names: Iterable[str]) -> None:
    """Check that the weights of a folder, by their file names, are not parts of several processes.

    Files of a single process, as far as the names tell, are not refused.

    Raises:
        UnsupportedError: They are. The message says what to do.
    """
    chosen = list(names)
    for layout in _LAYOUTS:
        _refuse(folder, chosen, layout)


def refuse_overlapping_parts(folder: Path, names: Sequence[str]) -> None:
    """Check the same of files that have tensors' names in common; more names of files count then.

    Raises:
        UnsupportedError: They are. The message says what to do.
    """
    _refuse(folder, names, _PROCESS)


def part_of_model(path: Path, beside: Iterable[str]) -> str:
    """Return a line for people if the file at `path` is only a part of a model, or "".

    That is told by its name, and by `beside`, the names of all files in its folder.
    """
    whole = "give the folder for the whole model"
    if count := shards_of(path.name):
        return f"1 of {count} numbered files; {whole}"
    for layout in _LAYOUTS:
        if layout.files.fullmatch(path.name):
            matches = [match for name in beside if (match := layout.files.fullmatch(name))]
            processes = len({match["part"] for match in matches})
            advice = whole if processes < 2 else layout.advised(path.parent)
            return f"1 of {len(matches)} files {layout.what}; {advice}" if matches[1:] else ""
    return ""


def _refuse(folder: Path, names: Sequence[str], layout: _Layout) -> None:
    matches = [match for name in names if (match := layout.files.fullmatch(name))]
    if len({match["part"] for match in matches}) > 1:
        raise _unsupported(folder, [match.string for match in matches], layout)


def refuse_distributed(path: Path, names: Sequence[str]) -> None:
    """Check that the files at `path`, a folder or one of the files, are not those of PyTorch DCP.

    `names` are the paths of the files below the folder, hidden ones included.

    Raises:
        UnsupportedError: They are. The message says what to do.
    """
    data = [name for name in names if name.endswith(DISTRIBUTED)]
    alone = path.name == _DCP_METADATA or path.name.endswith(DISTRIBUTED)
    if not data and not alone:
        return
    model = [name for name in data if not Path(name).parent.name.startswith(_OPTIMIZER)]
    folder = path.parent if alone else path / Path((model or data)[0]).parent
    shown = shlex.quote(str(folder))
    raise UnsupportedError(
        f"{path}: files of torch.distributed.checkpoint, whose `.metadata` is a pickle that is not "
        "evaluated here; where you trust it, run `python -m torch.distributed.checkpoint."
        f"format_utils dcp_to_torch {shown} model.pt` and give model.pt; to save into a store from "
        "the start, see docs/howto/dcp.md",
        path=str(path),
        files=data or [path.name],
    )


def refuse_slices(root: Path, files: Iterable[tuple[Path, Header]], beside: Iterable[str]) -> None:
    """Check that no file holds slices of tensors, as the Hugging Face writer of DCP leaves them.

    `root` is the checkpoint, `files` are its weights, and `beside` the names of all files in the
    folder of the first. A tensor that begins at 0 in every dimension is a slice, too, if there are
    files of other processes.

    Raises:
        UnsupportedError: A file does. The message says what to do.
    """
    sliced = [path for path, header in files if _is_slices(header)]
    if not sliced:
        return
    found = [each["rank"] for name in beside if (each := _SLICE_FILE.fullmatch(name))]
    moved = any(_begins_inside(header) for path, header in files)
    if not moved and len(set(found)) < 2 and len(sliced) < 2:
        return
    names = [path.name for path in sliced]
    folder = shlex.quote(str(sliced[0].parent))
    raise UnsupportedError(
        f"{root}: {_listed(names)} hold slices of tensors, one file for each process that saved "
        "with torch.distributed.checkpoint.HuggingFaceStorageWriter, and all are needed; put them "
        f"together with consolidate_safetensors_files as in docs/howto/dcp.md, from {folder} into "
        "another folder, and give that one",
        path=str(root),
        files=names,
    )


def are_slices(names: Iterable[str]) -> bool:
    """Return whether all weights of a folder, by their file names, hold slices of tensors."""
    weights = [name for name in names if name.endswith(".safetensors")]
    return bool(weights) and all(_SLICE_FILE.fullmatch(name) for name in weights)


def _unsupported(folder: Path, names: list[str], layout: _Layout) -> UnsupportedError:
    return UnsupportedError(
        f"{folder}: {_listed(names)} are files {layout.what}, of which each process wrote its own, "
        f"and all are needed; {layout.advised(folder)}",
        path=str(folder),
        files=names,
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (
        f" and {len(names) - _SHOWN} more" if names[_SHOWN:] else ""
    )


def _sharding(header: Header) -> Mapping[str, object]:
    text = header.metadata.get(_SLICES) if isinstance(header, SafetensorsHeader) else None
    try:
        found = None if text is None else json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _is_slices(header: Header) -> bool:
    return bool(_sharding(header))


def _begins_inside(header: Header) -> bool:
    """Whether a tensor of the file begins further inside than at the first number of the whole."""
    for entry in _sharding(header).values():
        offsets = entry.get(_OFFSETS) if isinstance(entry, dict) else None
        if isinstance(offsets, list) and any(offsets):
            return True
    return False

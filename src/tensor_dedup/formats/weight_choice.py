"""The choice of a folder's weight files by their names alone. No I/O.

A folder often holds several copies of the same weights. One copy is chosen, the one that libraries
load by default:

- An index (`model.safetensors.index.json`) comes before everything else. The shards that it lists
  are the weights, and no other file of the folder is read.
- Without an index, `model.safetensors` comes before `model-00001-of-00002.safetensors` and so on.
- The plain file comes before its variants (`model.fp16.safetensors`). If there is no plain file,
  the first variant by alphabet is chosen.
- `consolidated*`, a publisher's own layout of the same weights, is chosen only if there is nothing
  else.

Files with unrelated names all belong to the checkpoint.

The same holds for files of torch.save (`pytorch_model.bin`, `pytorch_model.bin.index.json`). Among
them, those with the names that libraries give to weights come first. Files that a training run
writes beside its weights (`optimizer.pt`, `training_args.bin`) are left out, as its state.

The same holds for GGUF, except that a dot does not begin a variant. `model.Q4_K_M.gguf` and
`model.Q8_0.gguf` are two models in one folder, and names do not say which of them is meant.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from tensor_dedup.formats.left_out import LeftOutReason

SAFETENSORS = "safetensors"
PYTORCH = "bin|pt|pth|ckpt"
GGUF = "gguf"
# Of torch.distributed.checkpoint: beside weights, the state of an optimizer.
DISTRIBUTED = ".distcp"

_VARIANT = r"\.[A-Za-z]\w*"
_INDEX = re.compile(
    rf"(?P<stem>.+?)(?P<before>{_VARIANT})?"
    rf"\.(?P<suffix>safetensors|bin)\.index(?P<after>{_VARIANT})?\.json"
)
_SECOND_LAYOUT = "consolidated"
_WEIGHTS = re.compile(
    r"(pytorch_model|diffusion_pytorch_model|adapter_model|pytorch_lora_weights|model|weights"
    r"|open_clip_pytorch_model)(?![A-Za-z]).*"
)
_GENERIC = frozenset(
    {
        "adapter_model",
        "consolidated",
        "diffusion_pytorch_model",
        "model",
        "open_clip_pytorch_model",
        "pytorch_lora_weights",
        "pytorch_model",
        "weights",
    }
)
# Of Trainer, accelerate and FSDP; then of DeepSpeed, whose models and optimizers lie in folders.
_TRAINING_STATE = re.compile(
    r"(training_args|optimizer|scheduler|scaler|rng_state|trainer_state|random_states|sampler"
    r"|dl_state_dict|custom_checkpoint)(?![A-Za-z]).*"
)
_DEEPSPEED_STATE = re.compile(r".+_(optim|model)_states\.pt")
_TRAINING_FOLDER = re.compile(r"global_step\d+|optimizer_\d+")
# A file called so holds weights, or what a training needs: as bytes of which nothing is known, it
# would be stored in vain.
_SUFFIXES = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".gguf",
    ".h5",
    ".msgpack",
    ".onnx",
    ".npz",
    DISTRIBUTED,
)
# Of Hugging Face's client, of browsers and of aria2, which leaves a file of its own beside.
UNFINISHED = (".incomplete", ".crdownload", ".part", ".aria2")
_SMALL_STATE = (".pkl", "trainer_state.json")


def _files_of(suffix: str) -> re.Pattern[str]:
    variant = "(?!)" if suffix == GGUF else _VARIANT
    return re.compile(
        rf"(?P<stem>.+?)(?P<before>{variant})?"
        rf"(-(?P<shard>\d+)-of-(?P<count>\d+)(?P<after>{variant})?)?\.({suffix})"
    )


_FILES = {suffix: _files_of(suffix) for suffix in (SAFETENSORS, PYTORCH, GGUF)}


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The names of the weight files to read in a folder.

    Either `indexes` names shard indexes, and the shards that they list are read, or `files` names
    the weight files. `missing` is the first file that is missing among numbered files, or None.
    """

    indexes: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    missing: str | None = None


@dataclass(slots=True)
class _Copy:
    """One copy of a folder's weights: an index, a single file or sets of shards.

    `shards` has the numbers seen, by what is before them, how many there should be, and the rest.
    """

    index: str | None = None
    single: str | None = None
    shards: dict[tuple[str, str, str], set[int]] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)


def is_index(name: str) -> bool:
    """Return whether `name` is that of a shard index, such as `model.safetensors.index.json`."""
    return _INDEX.fullmatch(name) is not None


def is_generic(name: str) -> bool:
    """Return whether `name` is a usual name of weights, such as `model.safetensors`.

    Libraries use these names in every folder, so they say nothing about the model.
    """
    patterns = (_INDEX, *_FILES.values())
    found = next((match for each in patterns if (match := each.fullmatch(name))), None)
    return found is not None and found["stem"] in _GENERIC


def shards_of(name: str) -> int:
    """Return how many files there are of which `name` is one by its number, or 0.

    That is 3 for `model-00002-of-00003.safetensors`. It is 0 where there is only one, and for GGUF,
    whose headers say what a part is.
    """
    found = (_FILES[suffix].fullmatch(name) for suffix in (SAFETENSORS, PYTORCH))
    counts = [int(match["count"]) for match in found if match is not None and match["count"]]
    return next((count for count in counts if count > 1), 0)


def choose(names: Iterable[str], suffix: str = SAFETENSORS) -> WeightFiles:
    """Return the files of one copy of the weights among `names`, the file names of a folder.

    `suffix` is SAFETENSORS, PYTORCH or GGUF. Only files of this format are considered.
    """
    stems: dict[str, dict[str, _Copy]] = {}
    for name in sorted(names):
        _sort_in(name, suffix, stems)
    if len(stems) > 1:
        stems = {stem: copies for stem, copies in stems.items() if not _is_second(stem)} or stems
    copies = [variants[min(variants)] for _, variants in sorted(stems.items())]
    indexes = tuple(copy.index for copy in copies if copy.index is not None)
    if indexes:
        return WeightFiles(indexes=indexes)
    chosen = [_files(copy) for copy in copies]
    files = tuple(name for names, _ in chosen for name in names)
    return WeightFiles(files=files, missing=next((gap for _, gap in chosen if gap), None))


def _is_second(stem: str) -> bool:
    return stem.split(".")[0] == _SECOND_LAYOUT


def called_weights(names: Iterable[str]) -> list[str]:
    """Return those of `names` that libraries use for torch.save weights and their indexes."""
    return [name for name in names if _WEIGHTS.fullmatch(name)]


def perhaps_weights(names: Iterable[str]) -> list[str]:
    """Return those of `names` that may be weights.

    Names that training runs give to other files, such as `optimizer.pt`, are left out.
    """
    return [name for name in names if not _TRAINING_STATE.fullmatch(name)]


def why_left_out(path: str) -> LeftOutReason | None:
    """Return why a file that was not chosen is not kept with the checkpoint, by its name alone.

    `path` is relative to the checkpoint's folder. The result is None for a file that is not called
    as weights are, such as `config.json`: it belongs to the checkpoint.
    """
    if path.endswith(UNFINISHED):
        return LeftOutReason.UNFINISHED
    if not path.endswith(_SUFFIXES):
        return None
    return LeftOutReason.TRAINING_STATE if _is_state(path) else LeftOutReason.OTHER_COPY


def why_beside(path: str) -> LeftOutReason:
    """Return why a file that is in none of several models of a folder is left out, by its name.

    A single checkpoint keeps small files of a training (`random_states_0.pkl`). These models do
    not, so they are state of a training here, as `optimizer.bin` is.
    """
    if path.endswith(_SMALL_STATE) and _is_state(path):
        return LeftOutReason.TRAINING_STATE
    return why_left_out(path) or LeftOutReason.BESIDE_MODELS


def _is_state(path: str) -> bool:
    *folders, name = PurePosixPath(path).parts
    state = _TRAINING_STATE.fullmatch(name) or _DEEPSPEED_STATE.fullmatch(name)
    in_folder = any(map(_TRAINING_FOLDER.fullmatch, folders))
    return state is not None or name.endswith(DISTRIBUTED) or in_folder


def is_shard(name: str) -> bool:
    """Return whether `name` is numbered as one of several files, `model-00001-of-00002.bin`."""
    found = (pattern.fullmatch(name) for pattern in _FILES.values())
    return any(match is not None and match["shard"] is not None for match in found)


def _match(name: str, suffix: str) -> re.Match[str] | None:
    index = _INDEX.fullmatch(name)
    if index is not None:
        return index if index["suffix"] in suffix.split("|") else None
    return _FILES[suffix].fullmatch(name)


def _sort_in(name: str, suffix: str, stems: dict[str, dict[str, _Copy]]) -> None:
    match = _match(name, suffix)
    if match is None:
        return
    # "" is the plain copy and sorts before every variant.
    variant = match["before"] or match["after"] or ""
    copy = stems.setdefault(match["stem"], {}).setdefault(variant, _Copy())
    if name.endswith(".json"):
        copy.index = name
    elif match["shard"] is None:
        copy.single = copy.single or name
    else:
        copy.names.append(name)
        head, tail = name[: match.start("shard")], name[match.end("count") :]
        copy.shards.setdefault((head, match["count"], tail), set()).add(int(match["shard"]))


def _files(copy: _Copy) -> tuple[list[str], str | None]:
    if copy.single is not None:
        return [copy.single], None
    for (head, count, tail), shards in copy.shards.items():
        # Some number their shards from 0: only how many there are is certain.
        if len(shards) < int(count):
            first = next(number for number in range(1, int(count) + 1) if number not in shards)
            return copy.names, f"{head}{str(first).zfill(len(count))}-of-{count}{tail}"
    return copy.names, None

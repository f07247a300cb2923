"""All errors that this package raises.

TensorDedupError
  - ConfigError                 a setting is wrong, unknown, or cannot be combined with another
  - CheckpointError             a checkpoint is not usable
      - CheckpointNotFoundError   no weights at that path
          - NoSuchPathError         no file and no folder at that path
      - SeveralModelsError        a folder of several models, where one was asked for
      - FormatError               the file is malformed (one subclass for each format)
      - ChangedFileError          the file changed while it was being read
      - UnreadableFileError       an existing file cannot be read
      - IncompleteCheckpointError weights that the model needs are not in it
  - IntegrityError              bytes do not match their digest, or what is known of them
      - AuditError                a shared layer differs from the one rebuilt from its checkpoint
  - StoreError                  the store cannot do what was asked, or is damaged, or is no store
  - UnsupportedError            this engine, version or device cannot do what was asked
      - NotInstalledError         because the package of an extra is not installed

All are picklable, for worker processes. `facts` has the values in the message, and each message
ends with what the user can do.
"""

import shlex
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, Final

WRONG_DATA: Final = 1
WRONG_USE: Final = 2
NOBODY_THERE: Final = 3


class TensorDedupError(Exception):
    """Base of all errors of this package. `facts` maps names to the values in the message.

    `exit_status` is the exit status of a command that ends with the error:

    * `WRONG_DATA` for bad data;
    * `WRONG_USE` if another command line or an installation would help;
    * `NOBODY_THERE` if a memory manager, remote or engine does not answer.
    """

    exit_status: ClassVar[int] = WRONG_DATA

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.message = message
        self.facts = facts

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.facts)


def _rebuild(cls: type[TensorDedupError], message: str, facts: dict[str, Any]) -> TensorDedupError:
    return cls(message, **facts)


class ConfigError(TensorDedupError):
    """A setting is invalid, unknown, or cannot be combined with another one."""

    exit_status = WRONG_USE


class CheckpointError(TensorDedupError):
    """A checkpoint is not usable."""


class CheckpointNotFoundError(CheckpointError):
    """There are no weights at the given path."""


class NoSuchPathError(CheckpointNotFoundError):
    """There is no file and no folder at the given path."""

    exit_status = WRONG_USE


class SeveralModelsError(CheckpointError):
    """A folder holds several models, where one was asked for.

    `models` has the path of each. Each path can be given in place of the folder. `projectors` are
    those of them that are no models by themselves. `left_out` has the files of the folder that are
    in none of the models, as `LeftOut` of `tensor_dedup.formats.left_out`.
    """

    exit_status = WRONG_USE

    @classmethod
    def of(
        cls,
        path: str,
        what: str,
        models: Mapping[str, str],
        *,
        projectors: Collection[str] = (),
        left_out: Sequence[object] = (),
        notes: Sequence[str] = (),
    ) -> "SeveralModelsError":
        """Return the error for the folder `path`; `what` says what it is.

        `models` maps the path of each model to its name, or to "" if it has none. `projectors` are
        the paths of those that are projectors. `left_out` are the files that are in none of the
        models, and `notes` ends the message with what there is to say of them.
        """
        names = {**models, **dict.fromkeys(projectors, "projector, used beside one of these")}
        listed = ", ".join(
            shlex.quote(model) + (f" ({name})" if name else "") for model, name in names.items()
        )
        example = next((model for model in models if model not in projectors), next(iter(models)))
        one, folder = shlex.quote(example), shlex.quote(path)
        return cls(
            f"{path}: {what}: {listed}; name one of them, as in `tensor-dedup import {one}`, "
            f"compare all with `tensor-dedup analyze {folder}`, or import each under its own name "
            + "; ".join([f"with `tensor-dedup import {folder} --all-models`", *notes]),
            path=path,
            models=list(models),
            projectors=list(projectors),
            left_out=tuple(left_out),
        )

    @property
    def models(self) -> list[str]:
        return list(self.facts["models"])

    @property
    def projectors(self) -> list[str]:
        return list(self.facts.get("projectors", ()))

    @property
    def left_out(self) -> tuple[Any, ...]:
        return tuple(self.facts.get("left_out", ()))


class FormatError(CheckpointError):
    """The file is malformed; `tensor_dedup.formats.errors` has one subclass for each format."""


class ChangedFileError(CheckpointError):
    """The file changed while it was being read, so it has to be loaded again."""


class UnreadableFileError(CheckpointError):
    """An existing file cannot be read, for example because a disk failed or a share is gone."""


class IncompleteCheckpointError(CheckpointError):
    """Weights that the model needs are not in the checkpoint."""

    @classmethod
    def of(cls, path: str, lacking: list[tuple[str, int]]) -> "IncompleteCheckpointError":
        """Return the error for the checkpoint at `path`.

        `lacking` are the parameters that the checkpoint does not fill, each with the number of its
        missing bytes.
        """
        shown = ", ".join(f"{name} ({nbytes} bytes)" for name, nbytes in lacking[:4])
        more = f" and {len(lacking) - 4} more" if len(lacking) > 4 else ""
        return cls(
            f"{path}: the checkpoint has nothing for {shown}{more}, which would be whatever memory "
            "held before; fetch the checkpoint again, or load it with the model class it is for",
            path=path,
            parameters=tuple(name for name, _ in lacking),
        )


class IntegrityError(TensorDedupError):
    """Bytes do not match their digest, or do not match what is known about them."""


class AuditError(IntegrityError):
    """A shared layer differs from the same layer rebuilt from its checkpoint."""


class StoreError(TensorDedupError):
    """The store cannot do what was asked, its files are damaged, or the folder is not a store."""


class UnsupportedError(TensorDedupError):
    """This engine, version or device cannot do what was asked."""


class NotInstalledError(UnsupportedError, ImportError):
    """A package that an optional extra installs is missing."""

    exit_status = WRONG_USE

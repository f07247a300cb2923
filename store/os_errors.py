"""What the operating system says, in the store's own words."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tensor_dedup.store.errors import NoSpaceError, StoreAccessError, StoreIOError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_DENIED = {errno.EACCES, errno.EPERM, errno.EROFS}


@contextmanager
def os_errors(root: Path) -> Iterator[None]:
    """Turn OSError into a StoreError about its file, or about `root` when it names none."""
    try:
        yield
    except OSError as error:
        path = error.filename if isinstance(error.filename, str | Path) else root
        what = error.strerror or str(error)
        if error.errno in _FULL:
            raise NoSpaceError.at(path, what, errno=error.errno) from error
        if error.errno in _DENIED:
            raise StoreAccessError.at(path, what, errno=error.errno) from error
        raise StoreIOError.at(path, what, errno=error.errno) from error

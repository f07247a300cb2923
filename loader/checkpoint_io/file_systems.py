"""Which file systems tell the truth about when a file changed."""

import ctypes
import sys

# A network file system may serve cached times, a FUSE one invents them, and neither numbers its
# files for good; these are local and keep ctime themselves, which no program can set back.
TRUSTED = {
    0xEF53: "ext2, ext3, ext4",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0x2FC12FC1: "zfs",
    0x01021994: "tmpfs",
    0x794C7630: "overlayfs",
}
# struct statfs begins with the type, as a word of the machine, and takes 120 bytes on 64-bit Linux.
_STATFS_BYTES = 512


def kind_of(fd: int) -> int | None:
    """The magic number of the file system an open descriptor is on; None when nobody can say."""
    if sys.platform != "linux":
        return None
    buffer = ctypes.create_string_buffer(_STATFS_BYTES)
    if ctypes.CDLL(None).fstatfs(fd, buffer) != 0:
        return None
    return ctypes.c_ulong.from_buffer(buffer).value


def is_trusted(fd: int) -> bool:
    """Whether times and inode numbers of this open file can stand for its bytes."""
    return kind_of(fd) in TRUSTED

"""Files of torch.save: read without torch as torch reads them; liars are told what they said."""

import os
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from files.pytorch_files import (
    HONEST,
    LIARS,
    PICKLE,
    Item,
    bytes_of,
    file_of,
    flat,
    parse,
    seen_by_us,
    shares_a_range,
    state,
    tensor,
    zip_of,
)
from files.refusals import refused
from tensor_dedup.errors import ChangedFileError, CheckpointNotFoundError
from tensor_dedup.formats.errors import (
    CheckpointFault,
    FormatFault,
    PytorchFault,
)
from tensor_dedup.formats.pytorch.reader import MAX_PICKLE_BYTES, PytorchHeader, read_header
from tensor_dedup.formats.safetensors import DTYPE_BITS

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16,
    torch.uint8, torch.bool, torch.complex128, torch.complex64, torch.complex32,
]  # fmt: skip
CHANNELS_LAST = torch.channels_last
# What torch says of its own saving and loading.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Detected pickle protocol"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support"),
    pytest.mark.filterwarnings("ignore:Sparse"),
]


def noise(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Any bits: NaN payloads too, but for truth values."""
    size = torch.tensor([], dtype=dtype).element_size()
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (*shape, size), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def check(path: Path, held: object, **how: Any) -> PytorchHeader:
    """Save, and compare all that was saved with what is read."""
    torch.save(held, path, **how)
    header = read_header(path)
    assert {member.name for member in header.members} == set(flat(held))
    found = seen_by_us(path, header)
    # torch's own careful reader knows no later protocol.
    careful = how.get("pickle_protocol", 2) < 4
    for name, wanted in flat(torch.load(path, weights_only=careful)).items():
        assert bytes_of(found[name]) == bytes_of(wanted), name
        assert (found[name].dtype, found[name].stride()) == (wanted.dtype, wanted.stride()), name
    ends = [(spec.start, spec.start + spec.nbytes) for spec in header.tensors]
    assert not shares_a_range(ends)
    assert header.header_bytes == path.stat().st_size - sum(spec.nbytes for spec in header.tensors)
    return header


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(7, 4)
        self.body = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_the_state_dict_of_a_module(tmp_path: Path, protocol: int) -> None:
    header = check(tmp_path / "net.pt", Net().state_dict(), pickle_protocol=protocol)
    assert "head.weight" not in {spec.name for spec in header.tensors}
    tied = next(member for member in header.members if member.name == "head.weight")
    assert (tied.held_by, tied.plain, tied.shape) == ("embed.weight", True, (7, 4))
    specs = {spec.name: spec for spec in header.tensors}
    assert specs["body.1.num_batches_tracked"].shape == ()
    assert specs["body.1.num_batches_tracked"].dtype == "I64"
    assert specs["body.0.weight"].shape == (4, 4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    held = {"w": noise(dtype, 3, 5), "one": noise(dtype), "none": noise(dtype, 0, 4)}
    header = check(tmp_path / "w.pt", held)
    assert {spec.name: spec.shape for spec in header.tensors} == {
        "w": (3, 5),
        "one": (),
        "none": (0, 4),
    }
    (name,) = {spec.dtype for spec in header.tensors}
    assert DTYPE_BITS.get(name, 8 * held["w"].element_size()) == 8 * held["w"].element_size()
    assert (name in DTYPE_BITS) == (dtype not in (torch.complex128, torch.complex32))


def test_two_numbers_to_a_byte_are_counted_as_safetensors_does(tmp_path: Path) -> None:
    raw = torch.arange(12, dtype=torch.uint8).reshape(3, 4)
    torch.save({"w": raw.view(torch.float4_e2m1fn_x2)}, tmp_path / "w.pt")
    (spec,) = read_header(tmp_path / "w.pt").tensors
    assert (spec.dtype, spec.shape, spec.nbytes) == ("F4", (3, 8), 12)
    file = (tmp_path / "w.pt").read_bytes()
    assert file[spec.start : spec.start + 12] == bytes(range(12))


def test_a_training_checkpoint(tmp_path: Path) -> None:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    net.body(net.embed(torch.arange(7))).sum().backward()
    optimizer.step()
    held = {
        "epoch": 3,
        "best": 0.5,
        "name": "é",
        "model": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "random": torch.get_rng_state(),
        "history": [{"loss": torch.tensor(0.5)}, (torch.zeros(2), None)],
        "device": torch.device("cpu"),
        "type": torch.bfloat16,
        "size": torch.Size([2, 3]),
        "raw": b"bytes",
        "array": bytearray(b"bytes"),
        "set": {1, 2},
        "large": 1 << 200,
        "complex": 1j,
        "parameter": torch.nn.Parameter(torch.ones(2)),
    }
    header = check(tmp_path / "last.ckpt", held)
    names = {member.name for member in header.members}
    assert names >= {"model.embed.weight", "optimizer.state.0.exp_avg", "random", "parameter"}
    assert names >= {"history.0.loss", "history.1.0", "optimizer.state.1.step"}


def test_parts_of_a_storage_are_tensors_of_their_own(tmp_path: Path) -> None:
    fused = noise(torch.bfloat16, 6, 4)
    q, k, v = fused.chunk(3)
    header = check(tmp_path / "qkv.pt", {"q": q, "k": k, "v": v, "again": k})
    assert [(spec.name, spec.shape, spec.nbytes) for spec in header.tensors] == [
        ("q", (2, 4), 16),
        ("k", (2, 4), 16),
        ("v", (2, 4), 16),
    ]
    assert {member.name: member.held_by for member in header.members}["again"] == "k"


def test_a_part_of_a_storage_leaves_the_rest_unnamed(tmp_path: Path) -> None:
    header = check(tmp_path / "part.pt", {"middle": noise(torch.float32, 100)[10:20]})
    (spec,) = header.tensors
    assert (spec.name, spec.nbytes) == ("middle", 40)


@pytest.mark.parametrize(
    ("what", "views"),
    [
        ("transposed", lambda w: {"w": w.t()}),
        ("beside its transpose", lambda w: {"w": w, "t": w.t()}),
        ("columns", lambda w: {"left": w[:, :2], "right": w[:, 2:]}),
        ("steps", lambda w: {"w": w[::2]}),
        ("lying across", lambda w: {"a": w[:4], "b": w[2:]}),
        ("one in another", lambda w: {"all": w, "row": w[3]}),
        ("expanded", lambda w: {"w": w[0, 0].expand(9, 9)}),
        ("channels last", lambda w: {"w": w.view(1, 2, 3, 4).to(memory_format=CHANNELS_LAST)}),
        ("empty in the middle", lambda w: {"w": w, "none": w[3:3], "t": w.t()}),
    ],
)  # fmt: skip
def test_other_views_are_their_storage(
    tmp_path: Path, what: str, views: Callable[[torch.Tensor], dict[str, torch.Tensor]]
) -> None:
    held = views(noise(torch.float32, 6, 4))
    header = check(tmp_path / "views.pt", held)
    whole = [spec for spec in header.tensors if spec.nbytes]
    assert [(spec.name, spec.shape, spec.nbytes) for spec in whole] == [
        (next(iter(held)), (24,), 96)
    ]
    assert {member.held_by for member in header.members if member.nbytes} == {next(iter(held))}


def test_lazily_conjugated_numbers_are_their_storage(tmp_path: Path) -> None:
    torch.save({"w": noise(torch.complex64, 2, 2).conj()}, tmp_path / "w.pt")
    header = read_header(tmp_path / "w.pt")
    assert (header.tensors[0].shape, header.members[0].plain) == ((4,), False)


def test_what_other_options_write(tmp_path: Path) -> None:
    held = {"w": noise(torch.float32, 9)}
    torch.serialization.set_crc32_options(False)
    try:
        check(tmp_path / "unchecked.pt", held)
    finally:
        torch.serialization.set_crc32_options(True)
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 1]]), torch.tensor([1.0, 2.0]), (3,))
    torch.save({"s": sparse}, tmp_path / "sparse.pt")
    assert [spec.name for spec in read_header(tmp_path / "sparse.pt").tensors] == ["s.0", "s.1"]
    labelled = torch.ones(2)
    labelled.note = "of mine"  # type: ignore[attr-defined]
    check(tmp_path / "labelled.pt", {"w": labelled})
    check(tmp_path / "alone.pt", torch.ones(2))
    check(tmp_path / "ordered.pt", OrderedDict(a=torch.ones(1), b=OrderedDict(c=torch.zeros(2))))
    check(tmp_path / "empty.pt", {})


@pytest.mark.long
def test_sizes_and_places_beyond_4_gib(tmp_path: Path) -> None:
    path = tmp_path / "large.pt"
    held = {"a": torch.ones(3), "b": torch.zeros((1 << 32) + 100, dtype=torch.uint8)}
    torch.save({**held, "c": torch.arange(5)}, path)
    a, b, c = read_header(path).tensors
    assert (a.name, b.name, c.name, b.nbytes) == ("a", "b", "c", (1 << 32) + 100)
    with path.open("rb") as file:
        for spec, tensor in ((a, held["a"]), (c, torch.arange(5))):
            file.seek(spec.start)
            assert file.read(spec.nbytes) == bytes_of(tensor)


def test_what_another_zip_tool_packed_again(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(5)}, tmp_path / "w.pt")
    with zipfile.ZipFile(tmp_path / "w.pt") as old, zipfile.ZipFile(tmp_path / "x.pt", "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    (spec,) = read_header(tmp_path / "x.pt").tensors
    file = (tmp_path / "x.pt").read_bytes()
    assert file[spec.start : spec.start + 40] == bytes_of(torch.arange(5))


def test_the_old_stream_is_named_with_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "old.pt"
    torch.save({"w": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    with refused(PytorchFault.LEGACY_PYTORCH, match="weights_only=True"):
        read_header(path)


def test_a_program_is_named(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "program.pt", "w") as archive:
        archive.writestr("program/data.pkl", b"\x80\x02}.")
        archive.writestr("program/code/__torch__.py", b"def forward(self): pass")
    with refused(PytorchFault.TORCH_SCRIPT):
        read_header(tmp_path / "program.pt")


@pytest.mark.parametrize(("what", "file", "lie"), LIARS, ids=[what for what, _, _ in LIARS])
def test_a_liar_is_told_what_it_said(what: str, file: bytes, lie: FormatFault) -> None:
    with refused(lie) as caught:
        parse(file)
    assert str(caught.value).startswith("liar.pt: ")


def test_every_kind_of_error_has_a_liar() -> None:
    assert set(PytorchFault) - {lie for _, _, lie in LIARS} == {
        PytorchFault.PICKLE_TOO_LARGE,  # test_a_huge_pickle_is_not_read
    }


@pytest.mark.parametrize(("what", "file", "shapes"), HONEST, ids=[what for what, _, _ in HONEST])
def test_honest_oddities(what: str, file: bytes, shapes: dict[str, tuple[int, ...]]) -> None:
    assert {spec.name: spec.shape for spec in parse(file).tensors} == shapes


def test_an_error_names_tensor_and_numbers_and_survives_pickling() -> None:
    with refused(PytorchFault.BEYOND_STORAGE) as caught:
        parse(file_of(state(w=tensor(size=(3,)))))
    error = pickle.loads(pickle.dumps(caught.value))
    assert error.facts == {"path": "liar.pt", "tensor": "w", "ends": 12, "nbytes": 8}
    assert str(error) == (
        "liar.pt: tensor 'w': ends at 12 of its storage of 8 bytes; "
        "download or save this file again"
    )


def test_a_huge_pickle_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.pt"
    size = MAX_PICKLE_BYTES + 1
    said = {"size": size, "packed": size}
    small = zip_of(Item(PICKLE.name, b"", local=said, central=said))
    directory = small.index(b"PK\x01\x02")
    with path.open("wb") as file:
        file.write(small[:directory])
        file.seek(size, os.SEEK_CUR)  # a hole: no such bytes are on the disk
        end = small.index(b"PK\x05\x06")
        start = (directory + size).to_bytes(4, "little")
        file.write(small[directory : end + 16] + start + small[end + 20 :])
    with refused(PytorchFault.PICKLE_TOO_LARGE, match=str(MAX_PICKLE_BYTES)):
        read_header(path)


def test_the_position_of_a_descriptor_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "w.pt"
    path.write_bytes(file_of())
    with path.open("rb") as opened:
        opened.seek(5)
        assert read_header("named", fd=opened.fileno()).tensors == read_header(path).tensors
        assert opened.tell() == 5


def test_what_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with refused(CheckpointFault.NOT_A_FILE):
        read_header(tmp_path)
    with pytest.raises(CheckpointNotFoundError):
        read_header(tmp_path / "nothing.pt")
    path = tmp_path / "shrinks.pt"
    path.write_bytes(file_of())
    status = os.stat_result((0o100644, 0, 0, 1, 0, 0, 1 << 20, 0, 0, 0))
    monkeypatch.setattr(os, "fstat", lambda fd: status)
    with pytest.raises(ChangedFileError, match="shrank"):
        read_header(path)

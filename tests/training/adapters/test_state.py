"""Arrays and tensors as pieces: the right bytes, no copies where none are needed, or refused."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from tensor_dedup.store.gathered import flat_bytes
from tensor_dedup.training.errors import DamagedStateError, UnsupportedArrayError
from tensor_dedup.training.state import NUMPY_CODES, NamedValue, pieces, raw, value

TORCH = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    "C128": torch.complex128,
    "C32": torch.complex32,
}


def one(held: Any) -> NamedValue:
    return pieces({"x": held})[0]


def address(piece: NamedValue) -> int:
    return int(np.frombuffer(flat_bytes(piece.data)[:], np.uint8).ctypes.data)


@pytest.mark.parametrize(("name", "code"), NUMPY_CODES.items())
def test_every_dtype_that_numpy_has_comes_back(name: str, code: str) -> None:
    array = np.arange(24).reshape(2, 3, 4).astype(code)
    piece = one(array)
    assert (piece.name, piece.dtype, piece.shape) == ("x", name, (2, 3, 4))
    assert bytes(piece.data) == array.tobytes()
    back = value(piece)
    assert isinstance(back, np.ndarray)
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)


@pytest.mark.parametrize(("name", "dtype"), TORCH.items())
def test_every_dtype_of_torch_has_its_bytes(name: str, dtype: torch.dtype) -> None:
    data = bytes(range(48)) if name != "BOOL" else bytes([0, 1] * 24)
    tensor = torch.frombuffer(bytearray(data), dtype=dtype).reshape(3, -1)
    piece = one(tensor)
    assert (piece.dtype, piece.shape, bytes(piece.data)) == (name, tuple(tensor.shape), data)


def test_contiguous_memory_is_not_copied() -> None:
    array, tensor = np.arange(8.0), torch.nn.Parameter(torch.ones(3, 4))
    assert address(one(array)) == array.ctypes.data
    assert address(one(tensor)) == tensor.data_ptr()
    assert address(one(tensor[1:])) == tensor[1:].data_ptr()
    assert address(one(array.reshape(2, 4))) == array.ctypes.data


def test_what_comes_back_has_memory_of_its_own() -> None:
    array = np.arange(8.0)
    back = value(one(array))
    assert isinstance(back, np.ndarray)
    back[:] = -1
    assert array[3] == 3


BASE = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
VIEWS = {
    "transposed": BASE.T,
    "every other": BASE[:, ::2],
    "backwards": BASE[::-1, :, ::-1],
    "fortran": np.asfortranarray(BASE),
    "expanded": np.broadcast_to(BASE[0, 0], (7, 5)),
    "no dimensions": np.array(1.5, np.float32),
    "one element": BASE[:1, :1, :1],
    "no rows": BASE[:0],
    "no columns": BASE[:, :, 3:3],
    "read only": np.frombuffer(BASE.tobytes(), np.float32),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_elements_are_in_order_however_they_lie(view: np.ndarray[Any, Any]) -> None:
    piece = one(view)
    assert (piece.shape, bytes(piece.data)) == (view.shape, view.tobytes("C"))
    if not view.flags.writeable or any(stride < 0 for stride in view.strides):
        return
    same = one(torch.from_numpy(view))
    assert (same.shape, bytes(same.data)) == (piece.shape, bytes(piece.data))


def test_the_other_byte_order_is_turned() -> None:
    array = np.arange(5, dtype=">i4")
    assert bytes(one(array).data) == array.astype("<i4").tobytes()


def test_conjugates_and_negatives_are_what_they_show() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    assert bytes(one(tensor.conj()).data) == tensor.numpy().conj().tobytes()
    assert bytes(one(tensor.conj().imag).data) == np.array([-2, 4], np.float32).tobytes()


MATRIX = torch.arange(24.0).view(4, 6) + 1
ONE_ELEMENT = {
    "of a column": MATRIX[1:2, 3],
    "in two dimensions": MATRIX[2:3, :1],
    "bfloat16": MATRIX.bfloat16()[1:2, 3],
    "conjugated": (MATRIX * 1j)[1:2, 3].conj(),
    "expanded": MATRIX[1:2, 3].as_strided((1, 1), (0, 7), 9),
    "of no dimension": MATRIX[1, 3],
}


@pytest.mark.parametrize("tensor", ONE_ELEMENT.values(), ids=ONE_ELEMENT)
def test_one_element_of_any_stride_has_its_bytes(tensor: torch.Tensor) -> None:
    assert tensor.is_contiguous()
    plain = torch.tensor(tensor.tolist(), dtype=tensor.dtype)
    piece = one(tensor)
    assert piece.shape == tuple(tensor.shape)
    assert bytes(piece.data) == bytes(plain.reshape(1).view(torch.uint8).numpy())


def test_arrays_of_one_element_too() -> None:
    array = np.arange(24, dtype=np.float32).reshape(4, 6)[1:2, 3]
    assert array.strides != (4,)
    assert bytes(one(array).data) == array.tobytes()


def test_not_numbers_keep_their_bits() -> None:
    bits = np.array([0x7FC00001, 0xFFC12345, 0x7F800001], np.uint32)
    assert bytes(one(bits.view(np.float32)).data) == bits.tobytes()
    assert bytes(one(torch.from_numpy(bits.view(np.float32))).data) == bits.tobytes()


def test_what_numpy_lacks_comes_back_as_the_piece() -> None:
    piece = one(torch.ones(3, dtype=torch.bfloat16))
    assert value(piece) is piece


def test_a_piece_stays_and_takes_the_name_of_its_key() -> None:
    piece = NamedValue("old", "U8", (2,), b"ab")
    assert one(piece) == NamedValue("x", "U8", (2,), b"ab")
    assert pieces({"old": piece})[0] is piece
    assert (piece.nbytes, bytes(raw(piece))) == (2, b"ab")


REFUSED: dict[str, Any] = {
    "objects": np.array([object()]),
    "records": np.zeros(2, [("a", "f4"), ("b", "i8")]),
    "text": np.array(["a"]),
    "bytes": np.array([b"a"]),
    "times": np.array(["2026-01-01"], "M8[D]"),
    "long double": np.zeros(2, np.longdouble),
    "masked": np.ma.masked_array([1.0], [True]),  # type: ignore[no-untyped-call]
    "meta": torch.empty(2, device="meta"),
    "sparse": torch.eye(2).to_sparse(),
    "a list": [1.0],
    "a number": 1.0,
    "lazy": torch.nn.LazyLinear(3).weight,
}


@pytest.mark.parametrize("held", REFUSED.values(), ids=REFUSED)
def test_what_has_no_bytes_is_refused_by_name(held: Any) -> None:
    with pytest.raises(UnsupportedArrayError, match=r"^layer\.3:") as caught:
        pieces({"layer.3": held})
    assert caught.value.facts["place"] == "layer.3"


@pytest.mark.filterwarnings("ignore")
def test_quantised_and_nested_tensors_are_refused() -> None:
    quantised = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for tensor in (quantised, nested):
        with pytest.raises(UnsupportedArrayError, match=r"^x: a"):
            one(tensor)


class Tagged(torch.Tensor):
    """A tensor of somebody's own, such as a distributed one."""


def test_a_kind_of_tensor_nobody_knows_is_refused() -> None:
    with pytest.raises(UnsupportedArrayError, match="Tagged"):
        one(torch.ones(2).as_subclass(Tagged))


def test_too_few_bytes_are_damage() -> None:
    with pytest.raises(DamagedStateError, match=r"3 bytes are no F32 of shape \(1,\)"):
        value(NamedValue("x", "F32", (1,), b"abc"))


def test_no_framework_is_imported_for_it() -> None:
    code = (
        "import sys\n"
        "import tensor_dedup.training.adapters as adapters\n"
        "from tensor_dedup.training.state import NamedValue, pieces\n"
        "from tensor_dedup.training.adapters import ModelAdapter, PyTorchAdapter\n"
        "pieces({'a': NamedValue('a', 'U8', (1,), b'a')})\n"
        "adapters.adapter_for({'a': 1}).extract({'a': [1, 2, (3, None)]})\n"
        "names = 'torch', 'sklearn', 'scipy', 'xgboost', 'lightgbm'\n"
        "print(*[name for name in names if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr

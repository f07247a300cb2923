"""The globals a pickle may name: what torch.save writes for tensors and plain containers.

Nothing is imported for a name: each stands for an inert value, and what calling it makes is decided
in machine.py. The list is that of torch.load(weights_only=True), less quantised, nested and
wrapped tensors.
"""

from collections.abc import Mapping
from types import MappingProxyType

from tensor_dedup.formats.pytorch.values import Dtype, Function, Inert, StorageType

# torch's name -> ours: safetensors' where it has one.
DTYPES: Mapping[str, Dtype] = MappingProxyType(
    {
        "float64": Dtype("F64", 64),
        "float32": Dtype("F32", 32),
        "float16": Dtype("F16", 16),
        "bfloat16": Dtype("BF16", 16),
        "float8_e4m3fn": Dtype("F8_E4M3", 8),
        "float8_e5m2": Dtype("F8_E5M2", 8),
        "float8_e4m3fnuz": Dtype("F8_E4M3FNUZ", 8),
        "float8_e5m2fnuz": Dtype("F8_E5M2FNUZ", 8),
        "float8_e8m0fnu": Dtype("F8_E8M0", 8),
        # Two numbers are one element to torch: geometry.py doubles the last dimension.
        "float4_e2m1fn_x2": Dtype("F4", 8),
        "int64": Dtype("I64", 64),
        "int32": Dtype("I32", 32),
        "int16": Dtype("I16", 16),
        "int8": Dtype("I8", 8),
        "uint64": Dtype("U64", 64),
        "uint32": Dtype("U32", 32),
        "uint16": Dtype("U16", 16),
        "uint8": Dtype("U8", 8),
        "bool": Dtype("BOOL", 8),
        "complex128": Dtype("C128", 128),
        "complex64": Dtype("C64", 64),
        "complex32": Dtype("C32", 32),
    }
)
_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
}
_FUNCTIONS = (
    "collections.OrderedDict",
    "collections.Counter",
    "torch.Size",
    "torch.device",
    "torch._utils._rebuild_tensor",
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_tensor_v3",
    "torch._utils._rebuild_parameter",
    "torch._utils._rebuild_parameter_with_state",
    "torch._utils._rebuild_sparse_tensor",
    "torch._tensor._rebuild_from_type_v2",
    "torch.serialization._get_layout",
    "_codecs.encode",
    "builtins.bytearray",
    "builtins.set",
    "builtins.complex",
)
_INERT = ("torch.Tensor", "torch.nn.parameter.Parameter")
# How Python 2, and protocol 2, call the builtins.
_OLD = {"__builtin__": "builtins"}

ALLOWED: Mapping[str, object] = MappingProxyType(
    {
        **{f"torch.{name}": dtype for name, dtype in DTYPES.items()},
        **{f"torch.{name}": StorageType(DTYPES[dtype]) for name, dtype in _STORAGES.items()},
        "torch.storage.UntypedStorage": StorageType(None),
        "torch.UntypedStorage": StorageType(None),
        **{name: Function(name) for name in _FUNCTIONS},
        **{name: Inert(name) for name in _INERT},
    }
)


def find(module: str, name: str) -> object | None:
    """What a global stands for; None when it may not be named. Nothing is imported."""
    # A dot in the name would reach through an object: `find("torch", "storage.UntypedStorage")`.
    return None if "." in name else ALLOWED.get(f"{_OLD.get(module, module)}.{name}")

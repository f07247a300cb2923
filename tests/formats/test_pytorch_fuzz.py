"""Files of torch.save nobody thought of: a FormatError, or what torch sees in them."""

import io
import pickle
import pickletools
import random
import warnings
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from files.pickle_programs import disturbed, file_with, program
from files.pytorch_files import HONEST, LIARS, bytes_of, file_of, flat, parse, seen_by_us
from files.refusals import count_accepted, mutated, peak_of
from processes import process_state
from tensor_dedup.errors import FormatError
from tensor_dedup.formats.pytorch.machine import evaluate
from tensor_dedup.formats.pytorch.opcodes import instructions
from tensor_dedup.formats.pytorch.reader import read_header


def saved(held: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(held, buffer)
    return buffer.getvalue()


def seeds() -> list[bytes]:
    weight = torch.arange(12.0).reshape(3, 4)
    nested = {"model": {"w": weight, "t": weight.t(), "tied": weight}, "step": 3, "lr": [0.1, None]}
    small = {"a": torch.ones(3, dtype=torch.bfloat16), "b": torch.zeros(2, dtype=torch.float8_e5m2)}
    return [saved(nested), saved(small), saved(torch.nn.Linear(2, 2).state_dict()), file_of()]


SEEDS = seeds()


def with_pickle(rng: random.Random, file: bytes) -> bytes:
    """The file with changes to its pickle alone, in an archive that is in order."""
    with zipfile.ZipFile(io.BytesIO(file)) as old:
        entries = {name: old.read(name) for name in old.namelist()}
    name = next(name for name in entries if name.endswith("/data.pkl"))
    entries[name] = mutated(rng, entries[name])
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as new:
        for entry, data in entries.items():
            new.writestr(entry, data)
    return buffer.getvalue()


def seen_by_torch(path: Path) -> dict[str, torch.Tensor] | None:
    """None where torch refuses the file, for whatever reason."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return flat(torch.load(path, weights_only=True))
        except (pickle.UnpicklingError, RuntimeError, TypeError, ValueError, KeyError):
            return None
        except (AttributeError, IndexError, EOFError, UnicodeDecodeError, AssertionError):
            return None


def judge(file: bytes, path: Path) -> bool:
    """Whether the file was taken; then torch sees the same in it, or refuses it."""
    return compared(file, path) is not None


def compared(file: bytes, path: Path) -> int | None:
    """How many tensors torch and we see alike, 0 where it refuses the file, None where we do."""
    path.write_bytes(file)
    try:
        header = read_header(path)
    except FormatError:
        return None
    theirs = seen_by_torch(path)
    if theirs is None:
        return 0
    ours = seen_by_us(path, header)
    for name in set(header.sparse.values()):
        whole = theirs.pop(name)
        for number, part in enumerate((whole._indices(), whole._values())):
            ours_too = ours.pop(f"{name}.{number}")
            assert (ours_too.dtype, ours_too.shape) == (part.dtype, part.shape), name
            assert bytes_of(ours_too) == bytes_of(part), name
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert kind_of(ours[name]) == kind_of(tensor), name
        assert bytes_of(ours[name]) == bytes_of(tensor), name
    return len(theirs)


def kind_of(tensor: torch.Tensor) -> tuple[object, ...]:
    flags = (tensor.is_conj(), tensor.is_neg())
    return (tensor.dtype, tensor.shape, tensor.stride(), *flags)


def fuzz(cases: int, seed: int, path: Path) -> None:
    def make(rng: random.Random, case: int) -> bytes:
        seed_file = rng.choice(SEEDS)
        return with_pickle(rng, seed_file) if case % 2 else mutated(rng, seed_file)

    accepted = count_accepted(cases, seed, make, lambda file: judge(file, path))
    # Fuzzing that never or always gets past the checks tests nothing.
    assert cases // 50 < accepted < cases * 9 // 10


def test_fuzz(tmp_path: Path) -> None:
    fuzz(3_000, 20_261_121, tmp_path / "fuzzed.pt")


@pytest.mark.long
def test_fuzz_for_minutes(tmp_path: Path) -> None:
    fuzz(150_000, 1, tmp_path / "fuzzed.pt")


def fuzz_programs(cases: int, seed: int, path: Path) -> None:
    rng = random.Random(seed)
    taken = alike = 0
    for case in range(cases):
        pickle_ = program(rng)
        file = file_with(disturbed(rng, pickle_) if case % 3 == 0 else pickle_)
        try:
            count = compared(file, path)
        except BaseException as error:
            error.add_note(f"case {case} of seed {seed}: {file!r}")
            raise
        taken += count is not None
        alike += bool(count)
    # Many are refused here, and of those that are not torch takes most.
    assert cases // 10 < alike <= taken < cases


def test_fuzz_programs(tmp_path: Path) -> None:
    fuzz_programs(3_000, 20_270_101, tmp_path / "program.pt")


@pytest.mark.long
def test_fuzz_programs_for_minutes(tmp_path: Path) -> None:
    fuzz_programs(150_000, 2, tmp_path / "program.pt")


def careful(file: bytes) -> None:
    with suppress(FormatError):
        parse(file)


def test_no_lie_makes_it_take_more_memory_than_the_file() -> None:
    for what, file, _ in LIARS:
        if what != "10^30 values":  # bounded by what is looked at: naming.py
            assert peak_of(lambda file=file: careful(file)) < (1 << 17) + 50 * len(file), what  # type: ignore[misc]


def test_fuzzed_files_do_not_either() -> None:
    rng = random.Random(2)
    for case in range(300):
        file = rng.choice(SEEDS)
        file = with_pickle(rng, file) if case % 2 else mutated(rng, file)
        assert peak_of(lambda file=file: careful(file)) < (1 << 17) + 50 * len(file), file  # type: ignore[misc]


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_any_bytes(file: bytes) -> None:
    for whole in (file, b"PK\3\4" + file):
        careful(whole)


@settings(max_examples=500)
@given(st.binary(max_size=60))
def test_any_pickle(blob: bytes) -> None:
    with suppress(FormatError):
        evaluate(b"\x80\x02" + blob, "any.pt")


@settings(max_examples=300)
@given(st.data())
def test_any_change_to_an_honest_file(data: st.DataObject) -> None:
    file = bytearray(data.draw(st.sampled_from([*SEEDS, *(file for _, file, _ in HONEST)])))
    at = data.draw(st.integers(0, len(file)))
    gone = data.draw(st.integers(0, 16))
    file[at : at + gone] = data.draw(st.binary(max_size=16))
    with suppress(FormatError):
        header = parse(bytes(file))
        assert max((s.start + s.nbytes for s in header.tensors), default=0) <= len(file)


def plain_values() -> st.SearchStrategy[object]:
    leaves = (
        st.none()
        | st.booleans()
        | st.integers(-(1 << 200), 1 << 200)
        | st.floats(allow_nan=False)
        | st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
        | st.binary(max_size=20)
    )
    return st.recursive(
        leaves,
        lambda inner: st.lists(inner, max_size=4)
        | st.tuples(inner) | st.tuples(inner, inner, inner)
        | st.dictionaries(st.text(max_size=4), inner, max_size=4),
        max_leaves=20,
    )  # fmt: skip


@settings(max_examples=300)
@given(plain_values(), st.sampled_from([3, 4, 5]))
def test_instructions_are_those_of_python(value: object, protocol: int) -> None:
    blob = pickle.dumps(value, protocol)
    with suppress(FormatError):  # halves of surrogate pairs
        ours = [(name, at) for name, _, at in instructions(blob, "any.pt")]
        assert ours == [(op.name, at) for op, _, at in pickletools.genops(blob)]
        evaluate(blob, "any.pt")


@settings(max_examples=200)
@given(plain_values(), st.sampled_from([3, 4, 5]))
def test_plain_values_are_evaluated(value: object, protocol: int) -> None:
    blob = pickle.dumps(_without_dicts(value), protocol)
    assert evaluate(blob, "any.pt") == _without_dicts(value)


def _without_dicts(value: object) -> object:
    """A dict comes back as its items: of plain lists and tuples equality says everything."""
    if isinstance(value, dict):
        return [_without_dicts(held) for held in value.values()]
    if isinstance(value, list | tuple):
        return type(value)(_without_dicts(held) for held in value)
    return value


def test_the_descriptor_is_all_that_is_used() -> None:
    before = process_state.descriptors()
    for file in (file_of(), b"PK\3\4", b"nothing"):
        careful(file)
    assert not process_state.descriptors() - before

"""Two checkpoints with byte-identical headers and different weights are never confused.

A file system keeps no digests, so everything that tells files apart cheaply can be made equal:
names, sizes, times, headers. Each test first shows that the model does share with itself.
"""

import gc
import logging
import mmap
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from files import hinted
from models import tiny_checkpoints as checkpoints
from tensor_dedup.digest import digest
from tensor_dedup.errors import ChangedFileError
from tensor_dedup.formats.safetensors import read_header
from tensor_dedup.loader.checkpoint_io.hints import ENVIRONMENT, FileIdentity, HintIndex
from vllm_runs import engines, plain

if TYPE_CHECKING:
    from vllm import LLM

pytestmark = pytest.mark.vllm

Digests = dict[tuple[int, int], str]


@dataclass
class World:
    """A checkpoint, its twin under the same header, copies of the first to change, what plain
    vLLM answers for both."""

    base: Path
    twin: Path
    fine_tune: Path
    copies: Iterator[Path]
    expected: dict[Path, tuple[plain.Answer, ...]] = field(default_factory=dict)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    root = tmp_path_factory.mktemp("identity")
    pair = checkpoints.make("llama", root)
    twin = checkpoints.same_header(pair.base, root / "twin")
    copies = [checkpoints.same(pair.base, root / f"copy-{number}") for number in range(12)]
    engines.leave_alone(*root.rglob(checkpoints.WEIGHTS))
    world = World(pair.base, twin, pair.fine_tune, iter(copies))
    engines.warm_up(pair.base)
    for path in (pair.base, twin, pair.fine_tune):
        llm = plain.engine(path)
        world.expected[path] = plain.outputs(llm)
        engines.drop(llm)
        del llm
    return world


@pytest.fixture(autouse=True)
def hints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HintIndex]:
    """An index of this test's own; the engines of the test are gone when the next begins."""
    monkeypatch.setenv(ENVIRONMENT, str(tmp_path / "hints.sqlite"))
    yield HintIndex()
    gc.collect()


def test_the_twins_differ_in_everything_but_their_headers(world: World) -> None:
    _assert_same_header(world.base, world.twin)
    assert world.expected[world.base] != world.expected[world.twin]
    assert set(checkpoints.different(world.base, world.twin)) == set(
        checkpoints.tensors(world.base)
    )


# --- three ways for other weights to come in under the same header, and a fourth


def _other_directory(world: World, path: Path) -> Path:
    return world.twin


def _rewritten_in_place(world: World, path: Path) -> Path:
    before = (path / checkpoints.WEIGHTS).stat()
    _rewrite(path, world.twin)
    after = (path / checkpoints.WEIGHTS).stat()
    same = ("st_dev", "st_ino", "st_size", "st_mtime_ns")
    assert [getattr(before, name) for name in same] == [getattr(after, name) for name in same]
    return path


def _renamed_over(world: World, path: Path) -> Path:
    fresh = path / "fresh"
    fresh.write_bytes((world.twin / checkpoints.WEIGHTS).read_bytes())
    before = (path / checkpoints.WEIGHTS).stat()
    os.utime(fresh, ns=(before.st_atime_ns, before.st_mtime_ns))
    fresh.replace(path / checkpoints.WEIGHTS)
    return path


def _link_switched(world: World, path: Path) -> Path:
    file = path / checkpoints.WEIGHTS
    file.unlink()
    file.symlink_to(world.twin / checkpoints.WEIGHTS)
    return path


@pytest.mark.parametrize(
    "switch", [_other_directory, _rewritten_in_place, _renamed_over, _link_switched]
)
def test_other_weights_under_the_same_header(
    world: World, switch: Callable[[World, Path], Path]
) -> None:
    path = next(world.copies)
    if switch is _link_switched:
        (path / checkpoints.WEIGHTS).unlink()
        (path / checkpoints.WEIGHTS).symlink_to(world.base / checkpoints.WEIGHTS)
    _assert_same_header(path, world.twin)
    first = engines.sharing(path)
    again = engines.sharing(path)
    _assert_all_shared(again, first)
    assert engines.last_report().known
    assert engines.last_report().bytes_read == 0

    other = switch(world, path)
    llm = engines.sharing(other)
    forms = engines.forms(plain.model(llm), plain.model(first))
    assert forms
    assert not any(forms.values())
    assert engines.last_report().shared_bytes == 0
    assert plain.outputs(llm) == world.expected[world.twin]
    assert plain.outputs(first) == plain.outputs(again) == world.expected[world.base]
    twice = engines.sharing(other)
    _assert_all_shared(twice, llm)
    assert plain.outputs(twice) == world.expected[world.twin]
    engines.drop(first, again, llm, twice)


# --- files that change while they are loaded


@dataclass
class Moment:
    """Runs `change` just before the `number`th read of tensor data in a load."""

    change: Callable[[], object]
    number: int
    seen: int = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        preadv = os.preadv

        def read(*args: object) -> int:
            self.seen += 1
            if self.seen == self.number:
                self.change()
            return preadv(*args)  # type: ignore[arg-type]

        monkeypatch.setattr(os, "preadv", read)


@pytest.mark.parametrize("number", [1, 12, 30])
def test_a_file_rewritten_during_a_load(
    world: World, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    path = next(world.copies)
    base = engines.sharing(world.base)
    again = engines.sharing(world.base)
    _assert_all_shared(again, base)
    moment = Moment(lambda: _rewrite(path, world.twin), number)
    with monkeypatch.context() as patch:
        moment.install(patch)
        with pytest.raises(ChangedFileError, match="changed while it was being loaded") as caught:
            engines.sharing(path)
    del caught
    assert moment.seen >= number
    # Nothing half-read stays behind, neither in memory nor among the hints.
    after = engines.sharing(path)
    assert not any(engines.forms(plain.model(after), plain.model(base)).values())
    assert plain.outputs(after) == world.expected[world.twin]
    assert plain.outputs(base) == world.expected[world.base]
    engines.drop(base, again, after)


def test_a_known_file_rewritten_during_a_load_that_reads_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = next(world.copies)
    first = engines.sharing(path)
    again = engines.sharing(path)
    _assert_all_shared(again, first)
    lookup = HintIndex.lookup

    def looked_up(self: HintIndex, fd: int, algorithm: str) -> Digests:
        found = lookup(self, fd, algorithm)
        _rewrite(path, world.twin)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(HintIndex, "lookup", looked_up)
        with pytest.raises(ChangedFileError, match="changed while it was being loaded") as caught:
            engines.sharing(path)
    del caught
    after = engines.sharing(path)
    assert plain.outputs(after) == world.expected[world.twin]
    engines.drop(first, again, after)


def test_a_file_replaced_during_a_load(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    path = next(world.copies)
    base = engines.sharing(world.base)
    again = engines.sharing(path)
    _assert_all_shared(again, base)
    with monkeypatch.context() as patch:
        Moment(lambda: _renamed_over(world, path), 1).install(patch)
        # The open file is still the old one, but losing its name changes its ctime as a write does.
        with pytest.raises(ChangedFileError, match="changed while it was being loaded") as caught:
            engines.sharing(path, verify="always")
    del caught
    after = engines.sharing(path)
    assert not any(engines.forms(plain.model(after), plain.model(base)).values())
    assert plain.outputs(after) == world.expected[world.twin]
    engines.drop(base, again, after)


# --- hints that are wrong


def test_a_wrong_hint_of_a_tensor_that_is_read_is_noticed(
    world: World, hints: HintIndex, caplog: pytest.LogCaptureFixture
) -> None:
    base = engines.sharing(world.base)
    [changed] = checkpoints.different(world.base, world.fine_tune)
    digests = _digests(world.fine_tune)
    place = _place(world.fine_tune, changed)
    _remember(hints, world.fine_tune, digests | {place: digest(b"something else")})
    with caplog.at_level(logging.WARNING, "tensor_dedup"):
        llm = engines.sharing(world.fine_tune)
    assert "loading again without hints" in caplog.text
    _assert_shares_all_but(changed, llm, base)
    assert not engines.last_report().known
    assert plain.outputs(llm) == world.expected[world.fine_tune]
    # What was read has taken the wrong hint's place.
    again = engines.sharing(world.fine_tune)
    _assert_all_shared(again, llm)
    assert engines.last_report().known
    assert engines.last_report().bytes_read == 0
    engines.drop(base, llm, again)


def test_hints_of_other_content_are_noticed_when_nothing_of_it_is_resident(
    world: World, hints: HintIndex, caplog: pytest.LogCaptureFixture
) -> None:
    _remember(hints, world.twin, _digests(world.base))
    with caplog.at_level(logging.WARNING, "tensor_dedup"):
        llm = engines.sharing(world.twin)
    assert engines.last_report().shared_bytes == 0
    assert "loading again without hints" in caplog.text
    base = engines.sharing(world.base)
    again = engines.sharing(world.base)
    _assert_all_shared(again, base)
    assert not any(engines.forms(plain.model(llm), plain.model(base)).values())
    assert plain.outputs(llm) == world.expected[world.twin]
    engines.drop(base, llm, again)


def test_verify_always_never_trusts_a_hint(world: World, hints: HintIndex) -> None:
    base = engines.sharing(world.base)
    wrong = _digests(world.base)
    _remember(hints, world.twin, wrong)
    # What no load can notice, as the manual says: so this is what `verify` must keep out.
    believed = engines.sharing(world.twin)
    _assert_all_shared(believed, base)
    assert plain.outputs(believed) == world.expected[world.base]
    llm = engines.sharing(world.twin, verify="always")
    assert engines.last_report().bytes_read == checkpoints.nbytes(world.twin)
    assert not engines.last_report().known
    assert not any(engines.forms(plain.model(llm), plain.model(base)).values())
    assert plain.outputs(llm) == world.expected[world.twin]
    engines.drop(base, believed, llm)


def test_a_write_through_a_mapping_that_no_time_tells_of(world: World) -> None:
    path = next(world.copies)
    file = path / checkpoints.WEIGHTS
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as mapped:
        # Only the first write to a clean page is accounted for: make every page dirty, wait.
        mapped[:] = mapped[:]
        engines.leave_alone(file)
        first = engines.sharing(path)
        again = engines.sharing(path)
        _assert_all_shared(again, first)
        assert engines.last_report().known
        engines.drop(first, again)
        del first, again
        gc.collect()
        mapped[:] = (world.twin / checkpoints.WEIGHTS).read_bytes()
        llm = engines.sharing(path)
        assert engines.last_report().shared_bytes == 0
        assert plain.outputs(llm) == world.expected[world.twin]
    engines.drop(llm)


def _assert_same_header(one: Path, other: Path) -> None:
    contents = [(path / checkpoints.WEIGHTS).read_bytes() for path in (one, other)]
    size = read_header(one / checkpoints.WEIGHTS).header_bytes
    assert contents[0][:size] == contents[1][:size]
    assert contents[0] != contents[1]
    assert len(contents[0]) == len(contents[1])


def _assert_all_shared(one: "LLM", other: "LLM") -> None:
    forms = engines.forms(plain.model(one), plain.model(other))
    assert forms
    assert all(forms.values())


def _assert_shares_all_but(changed: str, one: "LLM", other: "LLM") -> None:
    forms = engines.forms(plain.model(one), plain.model(other))
    private = {form.removesuffix(engines.PACKED) for form, shared in forms.items() if not shared}
    assert private == {changed}


def _rewrite(path: Path, like: Path) -> None:
    """Give the weights of `path` the content of `like`'s, in place, and their old mtime."""
    file = path / checkpoints.WEIGHTS
    before = file.stat()
    with file.open("r+b") as opened:
        opened.write((like / checkpoints.WEIGHTS).read_bytes())
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def _place(path: Path, name: str) -> tuple[int, int]:
    specs = {spec.name: spec for spec in read_header(path / checkpoints.WEIGHTS).tensors}
    return specs[name].start, specs[name].nbytes


def _digests(path: Path) -> Digests:
    """The true digest of every tensor of the file."""
    file = path / checkpoints.WEIGHTS
    content = file.read_bytes()
    specs = read_header(file).tensors
    return {(s.start, s.nbytes): digest(content[s.start : s.start + s.nbytes]) for s in specs}


def _remember(hints: HintIndex, path: Path, digests: Digests) -> None:
    with hinted.opened(path / checkpoints.WEIGHTS) as fd:
        before = FileIdentity.of(fd)
        assert hints.record(fd, before, hinted.old_enough(before), "blake3", digests)

"""What the tracer sees, what it answers, what it refuses; the oracle is the same code for real."""

import gc
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from tensor_dedup.loader.deferred.trace import Tracer, UntraceableError
from vllm_runs import deferring
from vllm_runs.deferring import Weights, module

VALUES = torch.arange(24, dtype=torch.float32).view(4, 6) / 8
aten = torch.ops.aten


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tensors = {"w": VALUES, "v": VALUES.flip(0).contiguous() + 0.5, "half": VALUES.half()}
    return deferring.save(tmp_path / "model.safetensors", tensors)


def one() -> nn.Module:
    return module(p=torch.full((4, 6), 7.0))


def same(make: Callable[[], nn.Module], path: Path, load: deferring.Load) -> deferring.Deferred:
    """Check every parameter against real loading; the (ended) run, to look at."""
    wanted = deferring.real(make(), path, load)
    with deferring.deferred(make(), path, load) as run:
        for name in run.parameters:
            assert run.bytes(name) == wanted[name], name
    return run


def refused(make: Callable[[], nn.Module], path: Path, load: deferring.Load) -> str:
    """Check that real loading works and deferred loading says that it does not; why."""
    deferring.real(make(), path, load)
    with pytest.raises(UntraceableError) as caught, deferring.deferred(make(), path, load):
        pass
    return str(caught.value)


# --- what is deferred


def test_nothing_is_read_while_tracing(path: Path) -> None:
    def load(m: Any, w: Weights) -> None:
        m.p.data.narrow(0, 0, 2).copy_(w["w"][:2])
        m.p.data[2:] = w["v"][2:] * 2

    with deferring.deferred(one(), path, load) as run:
        assert not run.file.reads
        assert run.parameters["p"].parameter.is_meta
    same(one, path, load)


def test_a_source_changed_in_place_is_what_it_was_to_those_who_took_it_before(path: Path) -> None:
    def load(m: Any, w: Weights) -> None:
        m.a.data.copy_(w["w"])
        w["w"].mul_(3)
        m.b.data.copy_(w["w"])

    def make() -> nn.Module:
        return module(a=torch.zeros(4, 6), b=torch.zeros(4, 6))

    assert same(make, path, load).file.reads == {"w": 1}


def test_constants_made_by_numpy_keep_their_content(path: Path) -> None:
    """Memory that torch did not allocate must not be taken for an untouched `empty`."""

    def load(m: Any, w: Weights) -> None:
        for value in (1.0, 2.0, 3.0):
            constant = torch.from_numpy(numpy.full((4, 6), value, dtype=numpy.float32))
            m.p.data.add_(constant * w["w"])

    same(one, path, load)


def test_a_constant_is_taken_as_it_is_at_that_moment(path: Path) -> None:
    def load(m: Any, w: Weights) -> None:
        constant = torch.ones(6)
        m.p.data[0].copy_(constant)
        constant.fill_(5)
        m.p.data[1].copy_(constant)

    same(one, path, load)


@pytest.mark.parametrize("factory", [torch.zeros, torch.ones])
def test_a_factory_on_the_parameters_device_has_content(
    path: Path, factory: Callable[..., torch.Tensor]
) -> None:
    def load(m: Any, w: Weights) -> None:
        made = factory(4, 6, device=m.p.device)
        made[1:].copy_(w["w"][1:])
        m.p.data.copy_(made)

    same(one, path, load)


def test_a_real_tensor_sent_to_the_parameters_device_has_content(path: Path) -> None:
    def load(m: Any, w: Weights) -> None:
        m.p.data.copy_(torch.arange(6.0).to(m.p.device) + w["w"].to(m.p.device))

    same(one, path, load)


def test_other_data_for_a_tensor_leaves_its_storage_known(path: Path) -> None:
    """The storage that the source had dies; another one may get its address."""

    def load(m: Any, w: Weights) -> None:
        for _ in range(5):
            for name in ("w", "v"):
                loaded = w[name].clone()
                loaded.data = loaded.data.double()
                gc.collect()
                m.p.data.mul_(0.5).add_(loaded.float().view(4, 6))

    same(one, path, load)


def test_a_result_turned_in_place_is_still_the_result(path: Path) -> None:
    def load(m: Any, w: Weights) -> None:
        turned = w["w"][:, :4].clone()
        turned.t_()
        m.p.data.copy_(turned)

    same(lambda: module(p=torch.zeros(4, 4)), path, load)


def test_tied_parameters_stay_one_object(path: Path) -> None:
    def make() -> nn.Module:
        made = one()
        made.register_parameter("q", made.get_parameter("p"))
        return made

    with deferring.deferred(make(), path, lambda m, w: m.q.data.copy_(w["w"])) as run:
        assert run.model.get_parameter("p") is run.model.get_parameter("q")
        assert list(run.parameters) == ["p"]
        assert run.bytes("p") == deferring.raw(VALUES)


def test_parameters_on_one_storage_see_each_others_writes(path: Path) -> None:
    def make() -> nn.Module:
        both = torch.zeros(6, 6)
        return module(upper=both[:4], lower=both[2:])

    def load(m: Any, w: Weights) -> None:
        m.upper.data.copy_(w["w"])
        m.lower.data.copy_(w["v"])

    assert same(make, path, load).file.reads == {"w": 1, "v": 1}


# --- what is answered with real data


@pytest.mark.parametrize(
    ("ask", "answer"),
    [
        (lambda t: t[1, 2].item(), VALUES[1, 2].item()),
        (lambda t: bool((t > 1).any()), True),
        (lambda t: torch.equal(t, VALUES), True),
        (lambda t: torch.equal(t, VALUES + 1), False),
        (lambda t: (t > 2).nonzero().tolist(), (VALUES > 2).nonzero().tolist()),
        (lambda t: t[t > 2].tolist(), VALUES[VALUES > 2].tolist()),
        (lambda t: torch.bincount(t.int()[0]).tolist(), VALUES.int()[0].bincount().tolist()),
        (lambda t: t.sum().item(), VALUES.sum().item()),
    ],
)
def test_questions_about_data_are_answered(
    path: Path, ask: Callable[[torch.Tensor], Any], answer: Any
) -> None:
    seen: list[Any] = []
    with deferring.deferred(one(), path, lambda m, w: seen.append(ask(w["w"]))) as run:
        assert seen == [answer]
        assert run.file.reads == {"w": 1}
        assert run.tracer.data_reads


def test_a_parameter_is_answered_with_what_it_would_hold(path: Path) -> None:
    seen: list[float] = []

    def load(m: Any, w: Weights) -> None:
        seen.append(m.p.data.sum().item())
        m.p.data.copy_(w["w"])
        seen.append(m.p.data.sum().item())

    with deferring.deferred(one(), path, load) as run:
        assert seen == [7.0 * 24, VALUES.sum().item()]
        assert run.file.reads == {"w": 1}
        assert run.bytes("p") == deferring.raw(VALUES)
        assert run.file.reads == {"w": 1}


def test_an_answer_may_use_the_pool_of_threads(tmp_path: Path) -> None:
    """A source large enough to be hashed by other threads, which the load starts itself."""
    from tensor_dedup import digest

    digest._POOL.reset()
    big = torch.arange(1 << 18, dtype=torch.float32)
    path = deferring.save(tmp_path / "big.safetensors", {"w": big})
    seen: list[float] = []
    with deferring.deferred(one(), path, lambda m, w: seen.append(w["w"][-1].item())):
        assert seen == [big[-1].item()]


def test_our_own_work_may_use_the_pool_of_threads() -> None:
    """Files are opened while the model's code runs: what is remembered of them is hashed then."""
    from tensor_dedup import digest

    digest._POOL.reset()
    tracer = Tracer(lambda _: torch.empty(0), torch.device("cpu"))
    with tracer.recording():
        with tracer.own_work():
            assert digest.digest(bytes(5 << 20))
        with pytest.raises(UntraceableError, match="starts threads"):
            threading.Thread(target=list).start()


def test_indexing_by_numbers_reads_nothing(path: Path) -> None:
    def load(m: Any, w: Weights) -> None:
        m.p.data.copy_(w["w"][torch.tensor([3, 1, 2, 0])])

    with deferring.deferred(one(), path, load) as run:
        assert not run.file.reads
    same(one, path, load)


def test_writes_into_real_buffers_happen_at_once(path: Path) -> None:
    def make() -> nn.Module:
        made = one()
        made.register_buffer("b", torch.zeros(4, 6))
        return made

    def load(m: Any, w: Weights) -> None:
        buffer = m.get_buffer("b")
        buffer.copy_(w["w"])
        buffer[0].add_(w["v"][0])
        torch.mul(w["w"][1], 2, out=buffer[1])
        buffer[2] = w["half"][2]
        m.p.data.copy_(buffer)

    wanted = deferring.real(make(), path, load)
    with deferring.deferred(make(), path, load) as run:
        assert deferring.raw(run.model.get_buffer("b")) == wanted["b"]
        assert run.bytes("p") == wanted["p"]


# --- random numbers

_RANDOM: dict[str, Callable[[torch.Tensor], Any]] = {
    "normal_": lambda t: t.normal_(),
    "uniform_": lambda t: t.uniform_(),
    "bernoulli_": lambda t: t.bernoulli_(0.5),
    "exponential_": lambda t: t.exponential_(),
    "random_": lambda t: t.random_(0, 9),
    "log_normal_": lambda t: t.log_normal_(),
    "kaiming": lambda t: nn.init.kaiming_uniform_(t),
    "dropout": lambda t: nn.functional.dropout(t, inplace=True),
    "dropout of": lambda t: t.copy_(nn.functional.dropout(t)),
    "of a column": lambda t: t[:, 1].normal_(),
    "turned": lambda t: t.t().normal_(),
}


@pytest.mark.parametrize("draw", _RANDOM.values(), ids=_RANDOM)
def test_random_numbers_are_drawn_in_the_programs_order_and_stay_private(
    path: Path, draw: Callable[[torch.Tensor], Any]
) -> None:
    def load(m: Any, w: Weights) -> None:
        torch.rand(3)
        draw(m.a.data)
        torch.rand(3, device=m.a.device)
        draw(m.b.data)
        m.c.data.copy_(m.b.data * 2)
        m.d.data.copy_(w["w"])

    def make() -> nn.Module:
        return module(**{name: torch.full((4, 6), 2.0) for name in "abcd"})

    torch.manual_seed(5)
    wanted = deferring.real(make(), path, load)
    torch.manual_seed(5)
    with deferring.deferred(make(), path, load) as run:
        for name in "abcd":
            assert run.bytes(name) == wanted[name], name
        assert wanted["a"] != wanted["b"]
        assert run.recipe("a") != run.recipe("b")
        assert [run.reason(name) is None for name in "abcd"] == [False, False, False, True]


@pytest.mark.parametrize("make", [torch.rand_like, torch.randn_like, torch.bernoulli])
def test_random_results_of_deferred_tensors_are_refused(
    path: Path, make: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    message = refused(one, path, lambda m, w: m.p.data.copy_(make(w["w"] / 9)))
    assert "random" in message


@pytest.mark.parametrize(
    "add",
    [
        lambda t, v: t.index_add_(0, torch.tensor([0, 0]), v[:2]),
        lambda t, v: t.index_put_((torch.tensor([0, 0]),), v[:2], accumulate=True),
        lambda t, v: t.scatter_add_(0, torch.zeros(4, 6, dtype=torch.int64), v),
        lambda t, v: t.copy_(t.index_add(0, torch.tensor([0, 0]), v[:2])),
    ],
)
def test_sums_in_no_order_stay_private(path: Path, add: Callable[..., Any]) -> None:
    with deferring.deferred(one(), path, lambda m, w: add(m.p.data, w["w"])) as run:
        assert "not deterministic" in str(run.reason("p"))


# --- what is refused


def _start_thread(m: Any, w: Weights) -> None:
    thread = threading.Thread(target=lambda: m.p.data.copy_(w["w"]))
    thread.start()
    thread.join()


def _use_pool(m: Any, w: Weights) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(lambda: m.p.data.copy_(w["w"])).result()


def _resize_out(m: Any, w: Weights) -> None:
    joined = torch.empty_like(w["w"][:0])
    torch.cat([w["w"][:2], w["w"][2:]], out=joined)
    m.p.data.copy_(joined)


_REFUSED: dict[str, deferring.Load] = {
    "thread": _start_thread,
    "pool": _use_pool,
    "resize_": lambda m, w: m.p.data.resize_(2, 3),
    "set_": lambda m, w: m.p.data.set_(w["w"]),
    "out= that grows": _resize_out,
    "foreach": lambda m, w: torch._foreach_copy_([m.p.data], [w["w"]]),
    "foreach multiply": lambda m, w: torch._foreach_mul_([w["w"]], 2.0),
    "conjugated": lambda m, w: m.p.data[0, :3].copy_(
        torch.complex(w["w"], w["v"]).conj().imag[0, :3]
    ),
    "device of its own": lambda m, w: m.p.data.copy_(
        torch.tensor([1.0, 2, 3, 4, 5, 6], device=m.p.device)
    ),
    "list as an index": lambda m, w: m.p.data.__setitem__([0, 2], 1.0),
}


@pytest.mark.parametrize("load", _REFUSED.values(), ids=_REFUSED)
def test_what_cannot_be_deferred_is_refused(path: Path, load: deferring.Load) -> None:
    refused(one, path, load)


def test_a_meta_tensor_of_the_models_own_is_refused(path: Path) -> None:
    with torch.device("meta"):
        foreign = torch.empty(4, 6)
    for load in (
        lambda m, w: m.p.data.copy_(foreign),
        lambda m, w: foreign.copy_(w["w"]),
        lambda m, w: foreign.add_(w["w"]),
        lambda m, w: m.p.data.copy_(w["w"] + foreign),
        lambda m, w: torch.equal(w["w"], foreign),
    ):
        with pytest.raises(UntraceableError), deferring.deferred(one(), path, load):
            pass


def test_threads_may_be_started_again_afterwards_and_by_others(path: Path) -> None:
    others: list[int] = []

    def load(m: Any, w: Weights) -> None:
        with pytest.raises(UntraceableError):
            threading.Thread(target=others.append, args=(1,)).start()

    with deferring.deferred(one(), path, load):
        pass
    thread = threading.Thread(target=others.append, args=(2,))
    thread.start()
    thread.join()
    assert others == [2]


@pytest.mark.parametrize(
    "load",
    [
        lambda m, w: m.p.data.copy_(w["w"][:3]),
        lambda m, w: m.p.data.add_(w["w"][:, :4]),
        lambda m, w: m.p.data.narrow(0, 3, 4),
        lambda m, w: m.p.data.masked_fill_(torch.ones(3, dtype=torch.bool), 1.0),
    ],
)
def test_a_checkpoint_that_does_not_fit_fails_at_once_as_it_does_for_real(
    path: Path, load: deferring.Load
) -> None:
    with pytest.raises(RuntimeError):
        deferring.real(one(), path, load)
    with pytest.raises(RuntimeError), deferring.deferred(one(), path, load):
        pass

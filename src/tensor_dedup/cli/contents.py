"""The verbs that look into a store: du, find, cat."""

import os
import shlex
import sys
from collections.abc import Sequence
from contextlib import suppress

import click

from tensor_dedup.analyze import analyze
from tensor_dedup.analyze.stored import full_name, resolved_name
from tensor_dedup.api import Store
from tensor_dedup.cli import WrongUse, repeating_given
from tensor_dedup.cli.store import (
    damage_lines,
    empty,
    existing,
    existing_or_said,
    follow_links_option,
    known,
    name_argument,
    print_fitted,
    store_option,
    stored_names,
)
from tensor_dedup.cli.tables import counted
from tensor_dedup.cli.terminal import ByteBar, json_option, say
from tensor_dedup.errors import StoreError
from tensor_dedup.formats.hub_cache import locate
from tensor_dedup.loader.checkpoint_io.hints import HintIndex
from tensor_dedup.store.errors import NoStoreError
from tensor_dedup.store.reading.find import TensorPlace
from tensor_dedup.store.steps.runs import parse_step_name
from tensor_dedup.store.upkeep.usage import StoreUsage, Usage
from tensor_dedup.text_table import human
from tensor_dedup.types import STORE_SCHEME

_CHUNK = 64 << 20


@click.command(name="du")
@click.argument("name", required=False, shell_complete=stored_names)
@follow_links_option
@store_option
@json_option
@click.pass_context
def du(
    ctx: click.Context, name: str | None, follow_links: bool, store: str | None, as_json: bool
) -> None:
    """Show the disk space of each checkpoint and each run, and what deleting it frees.

    NAME selects one of them, or a step RUN@STEP. `alone` is the space that nothing else needs.
    `shared` is the space that others need too; it counts in each of their rows, and once in the
    sums. `gives back` is what deleting it frees: whole files, so small tensors stay while others in
    the same container are needed. The exit status is 1 if any of it cannot be read.

    NAME can also be a file, a folder or a name in your Hugging Face cache. Then `shared` is what
    the store already holds of it, and `new` what importing it would add.
    """
    if name is not None and _is_outside(name, store):
        _say_outside(name, store, follow_links, as_json)
        return
    nothing = StoreUsage((), 0, 0, 0, 0)
    opened = existing_or_said(store, as_json, nothing.to_dict())
    if opened is None:
        return
    name = resolved_name(opened, name) if name is not None else None
    found = opened.usage(name)
    shown = [each for each in found.checkpoints if name in (None, each.name)]
    if name is not None and not shown:
        opened.check_exists(name)
    damaged = [each for each in shown if each.damage is not None]
    if as_json:
        say(shown[0].to_dict() if name is not None else found.to_dict(), as_json)
    elif not shown:
        say({}, as_json, empty(opened, "no checkpoints"))
    else:
        _print(opened, shown)
        say({}, as_json, *([] if name is not None else _totals(found)), *damage_lines(damaged))
    if damaged:
        ctx.exit(1)


def _is_outside(name: str, store: str | None) -> bool:
    """Is it a path, or a name in the Hugging Face cache, and nothing that a store has?"""
    if name.startswith(STORE_SCHEME):
        return False
    with suppress(StoreError):
        opened = existing(store)
        if full_name(opened, name) in {*opened.names(), *opened.runs()}:
            return False
    return os.path.lexists(locate(name))


def _say_outside(name: str, store: str | None, follow_links: bool, as_json: bool) -> None:
    with ByteBar("hashing") as progress:
        found = analyze(
            [locate(name)], hints=HintIndex(), progress=progress, follow_links=follow_links
        )
    [checkpoint] = found.checkpoints
    sizes = {tensor.fingerprint.digest: tensor.nbytes for tensor in checkpoint.tensors}
    held = set[str]()
    with suppress(NoStoreError), existing(store).open_pieces(sizes) as pieces:
        held = {digest for digest in sizes if pieces.records(bytes.fromhex(digest))}
    shared = sum(sizes[digest] for digest in held)
    unique = found.unique_bytes - shared
    document = {"name": name, "kind": "outside", "nbytes": checkpoint.nbytes}
    say(
        {**document, "unique_bytes": unique, "shared_bytes": shared},
        as_json,
        f"size    {human(checkpoint.nbytes)} in {counted(len(checkpoint.tensors), 'tensor')}",
        f"shared  {human(shared)} that the store holds already",
        f"new     {human(unique)} that `tensor-dedup import {shlex.quote(name)}` would add",
    )


def _print(store: Store, found: Sequence[Usage]) -> None:
    columns = {
        "size": [human(each.nbytes) for each in found],
        "alone": [human(each.unique_bytes) for each in found],
        "shared": [human(each.shared_bytes) for each in found],
        "in place": [human(each.external_bytes) for each in found],
        "encoding saves": [human(each.encoding_saves_bytes) for each in found],
        "gives back": [known(each.reclaimable_bytes) for each in found],
    }
    for column in ("in place", "encoding saves"):
        if not any(getattr(each, _COUNTED[column]) for each in found):
            del columns[column]
    least = ["encoding saves", "in place", "size"]
    print_fitted(store, "name", [each.name for each in found], columns, least)


_COUNTED = {"in place": "external_bytes", "encoding saves": "encoding_saves_bytes"}


def _totals(found: StoreUsage) -> list[str]:
    stored = found.unique_bytes + found.shared_bytes
    lines = [
        f"needed     {human(stored)}: {human(found.unique_bytes)} alone, "
        f"{human(found.shared_bytes)} shared",
        f"on disk    {human(found.disk_bytes)}, with bookkeeping, unused bytes and the trash",
    ]
    if found.external_bytes:
        lines.append(f"in place   {human(found.external_bytes)}, not in the store")
    rows = sum(each.shared_bytes + each.external_bytes for each in found.checkpoints)
    if rows != found.shared_bytes + found.external_bytes:
        lines.append("What several need counts in each of their rows, and once in these sums.")
    return lines


@click.command(name="find")
@click.argument("digest")
@store_option
@json_option
def find(digest: str, store: str | None, as_json: bool) -> None:
    """Find the checkpoints that hold the tensor with this DIGEST, or one that begins with it."""
    opened = existing(store)
    found = opened.find(digest)
    if not found:
        said = (
            f"{opened.path}: no tensor has a digest that begins with {digest}; `tensor-dedup show` "
            "prints those of a checkpoint"
        )
        raise WrongUse(repeating_given(said))
    if as_json:
        say({"digest": digest, "tensors": [each.to_dict() for each in found]}, as_json)
        return
    rows = _by_holder(found)
    columns = {
        "dtype": [place.dtype for _, place in rows],
        "shape": ["x".join(map(str, place.shape)) or "-" for _, place in rows],
        "size": [human(place.nbytes) for _, place in rows],
        "digest": [place.digest[:12] for _, place in rows],
    }
    names = [f"{name}: {place.tensor}" for name, place in rows]
    print_fitted(opened, "checkpoint: tensor", names, columns, ["dtype", "shape", "size", "digest"])


def _by_holder(found: Sequence[TensorPlace]) -> list[tuple[str, TensorPlace]]:
    """One row a checkpoint and tensor; the steps of a run that have it are one row."""
    rows: dict[tuple[str, str, str], list[TensorPlace]] = {}
    for place in found:
        step = parse_step_name(place.checkpoint)
        holder = step.run if step is not None else place.checkpoint
        rows.setdefault((holder, place.tensor, place.digest), []).append(place)
    named = []
    for (holder, _, _), places in rows.items():
        steps = {step for place in places if (step := parse_step_name(place.checkpoint))}
        numbers = sorted({step.step for step in steps})
        if len(numbers) > 1:
            steps_of = counted(len(numbers), "step")
            holder = f"{holder}@{numbers[0]} to @{numbers[-1]} ({steps_of})"
        else:
            holder = places[0].checkpoint
        named.append((holder, places[0]))
    return named


def is_terminal() -> bool:
    """Return whether stdout is a terminal."""
    return sys.stdout.isatty()


@click.command(name="cat")
@name_argument
@click.argument("tensor")
@store_option
@json_option
def cat(name: str, tensor: str, store: str | None, as_json: bool) -> None:
    """Write the bytes of a TENSOR of the checkpoint NAME to stdout, verified first.

    They are the bytes of the file: contiguous, little-endian, without a header. --json describes
    the tensor instead.
    """
    opened = existing(store)
    with opened.checkpoint(resolved_name(opened, name)) as checkpoint:
        found = checkpoint[tensor]
        if as_json:
            document = {"name": checkpoint.name, "tensor": found.name, "dtype": found.dtype}
            sizes = {"shape": list(found.shape), "bytes": found.nbytes, "digest": found.digest}
            say({**document, **sizes}, as_json)
            return
        if is_terminal():
            raise WrongUse(
                f"{tensor!r} is {human(found.nbytes)} of raw bytes, nothing for a terminal; send "
                "them to a file (> FILE) or a program (|)"
            )
        for start in range(0, found.nbytes, _CHUNK):
            stop = min(start + _CHUNK, found.nbytes)
            sys.stdout.buffer.write(checkpoint.read_range(found, start, stop))
        sys.stdout.buffer.flush()

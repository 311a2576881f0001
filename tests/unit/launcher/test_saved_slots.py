"""Saved slots in their folder: whole or gone, worth most first, within the limit, tried once."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from warmslot.launcher.kv_file import UnknownLayoutError, restream
from warmslot.launcher.saved_slots import DamagedError, Folder, Saved, assign
from warmslot.router.core import Contents
from warmslot.router.residency import Context
from warmslot.router.values import Prompt

if TYPE_CHECKING:
    from pathlib import Path

MARK = "fingerprint"
LARGE = 1 << 30


def contents(text: bytes, slot: int = 0, chance: float = 1.0) -> Contents:
    prompt = Prompt.of(text)
    context = Context(prompt.chain, prompt.length, text, ((0, 0), (len(text), len(text) // 4)))
    return Contents(slot, context, "session", chance)


def text_of(name: str, length: int = 400) -> bytes:
    return (name.encode() * length)[:length]


def save(folder: Folder, held: Contents, *, slots: int = 2, mark: str = MARK, size: int = 0) -> Saved:
    name = folder.new_name()
    (folder.path / name).write_bytes(slot_file(slots, held.slot % slots, held.tokens) + bytes(size))
    return folder.note(name, held, mark, slots)


def cache(streams: int, filled: int, cells: int, *, more: int = 8, transposed: bool = False) -> bytes:
    """One cache of a slot file, of two layers."""
    out = struct.pack("<I", streams)
    for stream in range(streams):
        out += struct.pack("<I", cells if stream == filled else 0)
        if stream == filled and cells:
            out += b"".join(struct.pack("<iIi", cell, 1, 0) for cell in range(cells))
            out += struct.pack("<II", transposed, 2) + bytes(more)
            for _ in range(2):
                out += struct.pack("<iQ", 1, 4) + b"kkkk" * cells
            for _ in range(2):
                head = struct.pack("<iII", 1, 2, 2) if transposed else struct.pack("<iQ", 1, 4)
                out += head + b"vvvv" * cells
    return out


def slot_file(
    streams: int, filled: int, cells: int, *, caches: int = 1, more: int = 8, tail: bytes = b""
) -> bytes:
    tokens = struct.pack("<3I", 0x67677371, 4, cells) + bytes(4 * cells)
    parts = (cache(streams, filled, cells, more=more, transposed=bool(n)) for n in range(caches))
    return tokens + b"".join(parts) + tail


@settings(max_examples=60, deadline=None)
@given(
    streams=st.integers(1, 5),
    wanted=st.integers(1, 9),
    cells=st.integers(1, 7),
    caches=st.integers(1, 2),
    more=st.sampled_from([0, 4, 8]),
    data=st.data(),
)
def test_a_slot_file_is_fitted_to_any_slot_count(  # noqa: PLR0917 - hypothesis names them
    tmp_path_factory: pytest.TempPathFactory,
    streams: int,
    wanted: int,
    cells: int,
    caches: int,
    more: int,
    data: st.DataObject,
) -> None:
    folder = tmp_path_factory.mktemp("fit")
    filled = data.draw(st.integers(0, streams - 1))
    old, new = folder / "old", folder / "new"
    old.write_bytes(slot_file(streams, filled, cells, caches=caches, more=more))
    restream(old, new, streams, wanted)
    assert new.read_bytes() == slot_file(wanted, 0, cells, caches=caches, more=more)


def test_what_follows_the_caches_is_kept_as_it_is(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    old.write_bytes(slot_file(4, 2, 5, tail=b"a recurrent state"))
    restream(old, new, 4, 2)
    assert new.read_bytes() == slot_file(2, 0, 5, tail=b"a recurrent state")
    old.write_bytes(b"no slot file at all")
    with pytest.raises(UnknownLayoutError):
        restream(old, new, 4, 2)


def test_a_note_brings_everything_back_but_text(tmp_path: Path) -> None:
    saved = save(Folder(tmp_path, "one", LARGE), contents(text_of("secret words "), slot=1, chance=0.5))
    (again,) = Folder(tmp_path, "one", LARGE).all()
    assert again.contents.context.chain == saved.contents.context.chain
    assert (again.contents.slot, again.contents.tokens, again.worth) == (1, 100, 50.0)
    assert again.contents.context.data is None
    assert all(b"secret" not in file.read_bytes() for file in tmp_path.glob("*.json"))
    assert Folder(tmp_path, "two", LARGE).all() == []


def test_what_this_process_saved_keeps_its_text(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "one", LARGE)
    held = contents(text_of("words "))
    save(folder, held)
    assert folder.all()[0].contents is held


@pytest.mark.parametrize("harm", ["cut", "no note", "torn note", "tried", "changed"])
def test_damaged_files_are_removed_not_used(tmp_path: Path, harm: str) -> None:
    folder = Folder(tmp_path, "one", LARGE)
    saved = save(folder, contents(text_of("a")))
    note = saved.path.with_suffix(".json")
    if harm == "cut":
        saved.path.write_bytes(saved.path.read_bytes()[:-1])
    elif harm == "no note":
        note.unlink()
    elif harm == "torn note":
        note.write_bytes(note.read_bytes()[:40])
    elif harm == "tried":
        folder.begin_try(saved, 2)  # and the engine dies of it
    else:
        data = bytearray(saved.path.read_bytes())
        data[-1] ^= 1
        saved.path.write_bytes(data)
        (found,) = folder.all()
        with pytest.raises(DamagedError):
            folder.begin_try(found, 2)
        folder.drop(found.path)
    assert Folder(tmp_path, "one", LARGE).all() == []
    assert list(tmp_path.iterdir()) == []


def test_files_of_another_fingerprint_or_too_long_ones_are_not_used(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "one", LARGE)
    save(folder, contents(text_of("a")), mark="another")
    fit = save(folder, contents(text_of("b")))
    save(folder, contents(text_of("c", 4000)))
    assert [saved.path for saved in folder.fitting(MARK, 512)] == [fit.path]


def test_the_least_valuable_go_first_and_parts_of_longer_ones_at_once(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "one", 25_000)
    for name, chance in (("a", 0.1), ("b", 0.9), ("c", 0.5)):
        save(folder, contents(text_of(name), chance=chance), size=8_000)
    folder.trim()
    assert [round(saved.worth) for saved in folder.all()] == [90, 50]
    save(folder, contents(text_of("b", 800), chance=0.9), size=100)
    folder.trim()
    assert [round(saved.worth) for saved in folder.all()] == [180, 50]


def test_slots_are_given_their_own_files_where_they_can(tmp_path: Path) -> None:
    folder = Folder(tmp_path, "one", LARGE)
    a, b, c = (
        save(folder, contents(text_of(name), slot=slot, chance=1 / rank), slots=4)
        for rank, (name, slot) in enumerate([("a", 1), ("b", 3), ("c", 1)], 1)
    )
    found = folder.fitting(MARK, 512)
    assert [saved.path for saved in found] == [a.path, b.path, c.path]
    assert {slot: saved.path for slot, saved in assign(found[:2], 2).items()} == {0: b.path, 1: a.path}
    assert {slot: saved.path for slot, saved in assign(found, 4).items()} == {0: c.path, 1: a.path, 3: b.path}

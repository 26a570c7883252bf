"""A model of a disk that loses power: which states of a folder are possible afterwards.

A `Disk` records everything that happens below a folder while code runs. It knows what is *visible* on the
running system, and what is *durable*, that is, covered by the last fsync of each file and folder. At a power
loss every difference between the two is independent:

- a name may be as it is visible or as it was durable, whatever happened to other names of the same folder,
  also if one rename changed both;
- the content of a file that was written since its last fsync may be new, old, empty, truncated, or zeros.

No file system is that bad; what holds here holds on all of them. `survivors` returns these states: all of
them if there are few differences, else the extreme ones and a sample.
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import pytest

Entries: TypeAlias = Mapping[str, int]
Node: TypeAlias = bytes | Entries
"""The content of a file, or the names of a folder with their inodes."""

Nodes: TypeAlias = Mapping[int, Node]
Tree: TypeAlias = Mapping[str, bytes | None]
"""A state of the folder: path → content, None for a folder."""

STEPS = ("fsync", "link", "replace", "rename", "unlink", "mkdir", "rmdir")
FEW = 5


@dataclass(frozen=True)
class Moment:
    """The disk before or after one step; `noted` is what the code had promised by then."""

    step: str
    visible: Nodes
    durable: Nodes
    noted: Any


@dataclass
class Disk:
    """Records `root`; its name and initial content are durable, unless `durable` is given."""

    root: Path
    note: Callable[[], Any]
    durable: dict[int, Node] = field(default_factory=dict)
    moments: list[Moment] = field(default_factory=list)
    _held: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.durable = self.durable or dict(self.visible())

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record the moments before and after each step of the code in the block."""
        with pytest.MonkeyPatch.context() as patch:
            for name in STEPS:
                patch.setattr(os, name, self._followed(name, getattr(os, name)))
            try:
                yield
                self._record("end")
            finally:
                for descriptor in self._held.values():
                    os.close(descriptor)

    def visible(self) -> Nodes:
        """What the running system shows now."""
        nodes: dict[int, Node] = {}
        for folder, _, files in os.walk(self.root):
            nodes[self._inode(Path(folder))] = _entries(Path(folder))
            for name in files:
                path = Path(folder, name)
                nodes[self._inode(path)] = path.read_bytes()
        return nodes

    def _inode(self, path: Path) -> int:
        # An inode that is held open is not given to another file.
        inode = path.stat().st_ino
        if inode not in self._held:
            self._held[inode] = os.open(path, os.O_RDONLY)
        return inode

    def _followed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def followed(file_or_path: int | str | Path, *more: object, **options: int) -> object:
            path = path_of(file_or_path, options.get("dir_fd"))
            if name != "fsync" and self.root not in path.parents:
                return call(file_or_path, *more, **options)
            self._record(f"before {name} {path.name}")
            result = call(file_or_path, *more, **options)
            if name == "fsync":
                self._flushed(path)
            self._record(f"after {name} {path.name}")
            return result

        return followed

    def _flushed(self, path: Path) -> None:
        if path == self.root or self.root in path.parents:
            self.durable[self._inode(path)] = _entries(path) if path.is_dir() else path.read_bytes()

    def _record(self, step: str) -> None:
        self.moments.append(Moment(step, self.visible(), dict(self.durable), self.note()))


def _entries(folder: Path) -> Entries:
    return {child.name: child.stat().st_ino for child in folder.iterdir()}


def path_of(file_or_path: int | str | Path, folder: int | None = None) -> Path:
    """The file of a call: a descriptor, or a path that may be relative to a folder's descriptor."""
    if isinstance(file_or_path, int):
        return Path(f"/proc/self/fd/{file_or_path}").readlink()
    return Path(file_or_path) if folder is None else path_of(folder) / file_or_path


def survivors(moment: Moment, root: int, seed: int = 0) -> Iterator[Tree]:
    """The distinct states that are possible after a power loss at that moment."""
    chance = random.Random(seed)
    open_names = _open_names(moment)
    seen = set()
    for flushed_names in _choices(open_names, chance):
        for damage in Damage:
            tree = dict(_grow(moment, root, frozenset(flushed_names), damage))
            key = frozenset(tree.items())
            if key not in seen:
                seen.add(key)
                yield tree


def _open_names(moment: Moment) -> list[tuple[int, str]]:
    """The names, by folder, that changed since the folder's last fsync."""
    changed = []
    for inode in moment.visible.keys() | moment.durable.keys():
        old, new = _names(moment.durable, inode), _names(moment.visible, inode)
        changed += [(inode, name) for name in old.keys() | new.keys() if old.get(name) != new.get(name)]
    return sorted(changed, key=lambda entry: (entry[1], entry[0]))


def _names(nodes: Nodes, inode: int) -> Entries:
    node = nodes.get(inode, {})
    return {} if isinstance(node, bytes) else node


def _choices(names: Sequence[tuple[int, str]], chance: random.Random) -> Iterator[Sequence[tuple[int, str]]]:
    """Which names are in their visible state; the others are in their durable state."""
    if len(names) <= FEW:
        for size in range(len(names) + 1):
            yield from itertools.combinations(names, size)
        return
    yield from ((), names)
    for name in names:
        yield (name,)
        yield [other for other in names if other != name]
    for _ in range(2**FEW):
        yield [name for name in names if chance.random() < 0.5]


class Damage(enum.Enum):
    """What can happen to content that was written since the last fsync of its file."""

    KEPT = enum.auto()
    """It is what it was at the last fsync; empty if there was none."""
    WHOLE = enum.auto()
    EMPTY = enum.auto()
    CUT = enum.auto()
    ZEROS = enum.auto()

    def done_to(self, visible: bytes, durable: bytes) -> bytes:
        match self:
            case Damage.KEPT:
                return durable
            case Damage.WHOLE:
                return visible
            case Damage.EMPTY:
                return b""
            case Damage.CUT:
                return visible[: len(visible) // 2]
            case Damage.ZEROS:
                return bytes(len(visible))


def _grow(
    moment: Moment,
    inode: int,
    flushed_names: frozenset[tuple[int, str]],
    damage: Damage,
) -> Iterator[tuple[str, bytes | None]]:
    old, new = _names(moment.durable, inode), _names(moment.visible, inode)
    for name in sorted(old.keys() | new.keys()):
        child = (new if (inode, name) in flushed_names else old).get(name)
        if child is None:
            continue
        durable, visible = moment.durable.get(child), moment.visible.get(child)
        if isinstance(visible if visible is not None else durable, bytes):
            yield name, _content(visible, durable, damage)
        else:
            yield name, None
            for path, content in _grow(moment, child, flushed_names, damage):
                yield f"{name}/{path}", content


def _content(visible: Node | None, durable: Node | None, damage: Damage) -> bytes:
    assert visible is None or isinstance(visible, bytes)
    assert durable is None or isinstance(durable, bytes)
    if visible is None or visible == durable:
        return durable or b""
    return damage.done_to(visible, durable or b"")


def put_down(tree: Tree, folder: Path) -> None:
    """Replace a folder's content by that state."""
    for path, content in tree.items():
        if content is None:
            (folder / path).mkdir(parents=True)
        else:
            (folder / path).write_bytes(content)


def after_kill(moment: Moment, root: int, folder: Path, note: Callable[[], Any]) -> Disk:
    """The disk after a process was killed: everything is visible, and nothing else became durable."""
    inodes, made = {root: folder.stat().st_ino}, dict[int, Path]()
    pending = [(root, folder)]
    while pending:
        inode, path = pending.pop()
        for name, child in _names(moment.visible, inode).items():
            node = moment.visible[child]
            if child in made:
                (path / name).hardlink_to(made[child])
            elif isinstance(node, bytes):
                (path / name).write_bytes(node)
            else:
                (path / name).mkdir()
                pending.append((child, path / name))
            inodes[child], made[child] = (path / name).stat().st_ino, path / name
    # What is durable only, because its removal is not, has no inode here.
    durable: dict[int, Node] = {
        inodes.get(inode, -inode): node
        if isinstance(node, bytes)
        else {name: inodes.get(child, -child) for name, child in node.items()}
        for inode, node in moment.durable.items()
    }
    return Disk(folder, note, durable)

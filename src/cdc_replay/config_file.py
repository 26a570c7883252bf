"""The text of a configuration file: YAML, its line numbers, and `${NAME}` from the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml
from yaml.composer import Composer

from cdc_replay.errors import InvalidConfiguration

VARIABLE: Final = "CDC_REPLAY_CONFIG"
DEFAULT_FILE: Final = "cdc_replay.yaml"
MOST_VALUES: Final = 100_000
"""In a file, those of an alias counted once per use."""
DEEPEST: Final = 20
"""How many values may be nested: more than any key needs. Each line is kept with all keys above it."""

_LOADER: type[yaml.SafeLoader | yaml.CSafeLoader] = yaml.SafeLoader
if yaml.__with_libyaml__:

    class _CLoader(Composer, yaml.CSafeLoader):
        """Parses in C, composes in Python, where too deep a nesting is an error and no crash."""

        def __init__(self, stream: str) -> None:
            yaml.CSafeLoader.__init__(self, stream)
            Composer.__init__(self)

    _LOADER = _CLoader

_REFERENCE: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """The plain values of a file, and the line of each key path."""

    path: Path
    content: Any
    lines: Mapping[tuple[str, ...], int]

    def line_of(self, keys: Sequence[str]) -> int:
        """The line of a key path, or of its longest prefix in the file."""
        path = tuple(keys)
        return next(
            (self.lines[path[:end]] for end in range(len(path), 0, -1) if path[:end] in self.lines), 1
        )


@dataclass(frozen=True, slots=True)
class _Size:
    """How many values a node is, those of an alias once per use, and how many are nested at most."""

    values: int
    depth: int


def read_config_file(path: str | Path | None) -> ConfigFile:
    """Read `path`, else `CDC_REPLAY_CONFIG`, else `cdc_replay.yaml`.

    Raises:
        InvalidConfiguration: naming file and line if it cannot be read, is not YAML, gives a key twice, or
            names a variable that is not set.
    """
    file = config_path(path)
    tree = _compose(file)
    return ConfigFile(file, lines=dict(_lines(tree)), content=_expand(tree, file))


def config_path(path: str | Path | None) -> Path:
    """`path`, else `CDC_REPLAY_CONFIG`, else `cdc_replay.yaml`."""
    return Path(path or os.environ.get(VARIABLE) or DEFAULT_FILE).absolute()


def expand_references(text: str) -> str:
    """The text with each `${NAME}` replaced by that environment variable.

    Raises:
        InvalidConfiguration: naming one that is not set.
    """

    def value(match: re.Match[str]) -> str:
        if (content := os.environ.get(match[1])) is None:
            raise InvalidConfiguration(f'environment variable "{match[1]}" is not set')
        return content

    return _REFERENCE.sub(value, text)


def has_reference(text: str) -> bool:
    """Whether `${NAME}` in the text would be replaced."""
    return _REFERENCE.search(text) is not None


def _compose(file: Path) -> yaml.Node:
    text = _read(file)
    try:
        node = yaml.compose(text, Loader=_LOADER)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 0
        raise InvalidConfiguration(f"{file}, line {line}: not valid YAML: {error.problem}") from None
    except yaml.reader.ReaderError as error:
        line = text.partition(chr(error.character))[0].count("\n") + 1
        raise InvalidConfiguration(
            f"{file}, line {line}: not valid YAML: character U+{error.character:04X} is not allowed",
            hint="Remove it.",
        ) from None
    except RecursionError:
        raise InvalidConfiguration(f"{file}, line 1: not a configuration: nested too deeply") from None
    if not isinstance(node, yaml.MappingNode):
        raise InvalidConfiguration(
            f"{file}, line 1: not a configuration", hint="The file must have the key `publishers`."
        )
    _check_size(node, file, {})
    _refuse_nul(node, file)
    return node


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InvalidConfiguration(
            f'configuration file "{file}" does not exist',
            hint=f"Give --config PATH, or set {VARIABLE}; `cdc-replay init` writes a first {DEFAULT_FILE}.",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfiguration(f'configuration file "{file}" cannot be read: {error}') from error


def _check_size(
    node: yaml.Node, file: Path, sizes: dict[int, _Size], within: frozenset[int] = frozenset()
) -> _Size:
    """The size of the node; `sizes` has those of the nodes seen before.

    Refuses more than `MOST_VALUES` or `DEEPEST`, which a few lines of aliases of aliases are, and a value
    without an end.
    """
    if id(node) in sizes:
        return sizes[id(node)]
    _refuse_compound_keys(node, file)
    inside = within | {id(node)}
    count, depth = 1, 1
    for _, line, value in _children(node):
        if id(value) in inside:
            raise InvalidConfiguration(
                f"{file}, line {line}: a value contains itself by an alias",
                hint="Write a value in place of the alias.",
            )
        size = _check_size(value, file, sizes, inside)
        count, depth = count + size.values, max(depth, 1 + size.depth)
        if count > MOST_VALUES:
            raise InvalidConfiguration(f"{file}, line {line}: more than {MOST_VALUES} values, with aliases")
        if len(inside) + size.depth > DEEPEST:
            raise InvalidConfiguration(f"{file}, line {line}: not a configuration: nested too deeply")
    sizes[id(node)] = _Size(count, depth)
    return sizes[id(node)]


def _refuse_compound_keys(node: yaml.Node, file: Path) -> None:
    """Refuse a key that is a list or a mapping; with aliases of aliases, its text has no bound."""
    for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
        if not isinstance(key, yaml.ScalarNode):
            line = key.start_mark.line + 1
            raise InvalidConfiguration(f"{file}, line {line}: a key must be a text", hint="Write a name.")


def _refuse_nul(node: yaml.Node, file: Path) -> None:
    """Refuse an escape of U+0000, which ends a DSN before its rest, and which no path or name can have."""
    for key, line, value in _children(node):
        if "\0" in key or (isinstance(value, yaml.ScalarNode) and "\0" in value.value):
            raise InvalidConfiguration(
                f"{file}, line {line}: character U+0000 is not allowed", hint="Remove its escape."
            )
        _refuse_nul(value, file)


def _children(node: yaml.Node) -> Iterator[tuple[str, int, yaml.Node]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield str(key.value), key.start_mark.line + 1, value
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield str(index), value.start_mark.line + 1, value


def _lines(node: yaml.Node, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], int]]:
    for key, line, value in _children(node):
        yield (*path, key), line
        yield from _lines(value, (*path, key))


def _expand(node: yaml.Node, file: Path) -> Any:  # noqa: ANN401 - YAML is any of these
    """The node's plain value with `${NAME}` replaced, refusing keys that are given twice."""
    if isinstance(node, yaml.MappingNode):
        result: dict[str, Any] = {}
        for key, line, value in _children(node):
            if key in result:
                raise InvalidConfiguration(f'{file}, line {line}: key "{key}" is given twice')
            result[key] = _expand(value, file)
        return result
    if isinstance(node, yaml.SequenceNode):
        return [_expand(value, file) for _, _, value in _children(node)]
    if _REFERENCE.search(node.value):
        return _REFERENCE.sub(
            lambda match: _environment(match[1], file, node.start_mark.line + 1), node.value
        )
    return _scalar(node, file)


def _scalar(node: yaml.Node, file: Path) -> Any:  # noqa: ANN401 - YAML is any of these
    """The value that the text stands for; an empty one is null."""
    try:
        return yaml.constructor.SafeConstructor().construct_document(node)
    except (yaml.YAMLError, ValueError, LookupError, AttributeError):
        # The last three are raised for texts that look like, or are tagged as, a date or a number.
        raise InvalidConfiguration(
            f"{file}, line {node.start_mark.line + 1}: not valid YAML: the value is not of the type"
            f" {node.tag.removeprefix('tag:yaml.org,2002:')}",
            hint="Put it in quotes if it is a text.",
        ) from None


def _environment(name: str, file: Path, line: int) -> str:
    try:
        return os.environ[name]
    except KeyError:
        raise InvalidConfiguration(
            f'{file}, line {line}: environment variable "{name}" is not set',
            hint=f"Set it, or replace ${{{name}}} by a value.",
        ) from None

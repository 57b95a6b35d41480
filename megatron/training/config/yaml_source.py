"""YAML text to a small tree of nodes that know their lines. Values stay text: types come from the fields, never from YAML.

PyYAML's own loaders would turn `1e-4` into text, `12:30` into 750 and `on` into True, drop all but the last of two equal
keys, and run constructors for tags. So the tree is built here from parser events, with limits on size and depth.
"""

import dataclasses
from collections.abc import Iterator

import yaml

from megatron.training.config.problems import Problems, shown

MAX_CHARACTERS = 200_000
MAX_DEPTH = 8


@dataclasses.dataclass(frozen=True)
class Scalar:
    """Text of a value or key. plain: written without quotes, so that null and true can be meant."""

    text: str
    plain: bool
    line: int


@dataclasses.dataclass(frozen=True)
class List:
    """A sequence."""

    items: tuple["Node", ...]
    line: int


@dataclasses.dataclass(frozen=True)
class Table:
    """A mapping, in file order; a key that came twice is there once (the second was reported)."""

    items: tuple[tuple[Scalar, "Node"], ...]
    line: int


Node = Scalar | List | Table


class YamlError(ValueError):
    """The text is no YAML that configurations are written in. line: 1-based, or None."""

    def __init__(self, reason: str, line: int | None) -> None:
        super().__init__(reason)
        self.line = line


def compose(text: str, name: str, problems: Problems) -> Node | None:
    """The tree of the one document in `text`, None if there is none.

    Duplicate keys are added to `problems` as `name:line`; anything that prevents reading on raises YamlError.
    """
    if len(text) > MAX_CHARACTERS:
        raise YamlError(f"{len(text):,} characters are no configuration (at most {MAX_CHARACTERS:,} are read)", None)
    try:
        return _Composer(name, problems).document(yaml.parse(text, Loader=yaml.SafeLoader))
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise YamlError(f"not valid YAML: {error.problem or error.context}", mark.line + 1 if mark else None) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise YamlError(f"not valid YAML: character {shown(chr(int(error.character)))} is not allowed", line) from None
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        if isinstance(error, YamlError):
            raise
        raise YamlError(f"not valid YAML: {error}", None) from None


class _Composer:
    """Walks parser events; one instance per document."""

    def __init__(self, name: str, problems: Problems) -> None:
        self._name, self._problems = name, problems
        self._anchors: dict[str, Node | None] = {}

    def document(self, events: Iterator[yaml.Event]) -> Node | None:
        root: Node | None = None
        started = False
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                if started:
                    raise YamlError("a second document begins here; write one per file", _line(event))
                started = True
            elif not isinstance(event, (yaml.StreamStartEvent, yaml.StreamEndEvent, yaml.DocumentEndEvent)):
                root = self._node(event, events, ())
        return root

    def _node(self, event: yaml.Event, events: Iterator[yaml.Event], path: tuple[str, ...]) -> Node:
        line = _line(event)
        if len(path) > MAX_DEPTH:
            raise YamlError(f"nested deeper than {MAX_DEPTH} levels", line)
        if isinstance(event, yaml.AliasEvent):
            node = self._anchors.get(str(event.anchor))
            if node is None:
                raise YamlError(f"alias *{event.anchor} has no finished anchor before it", line)
            return dataclasses.replace(node, line=line)
        assert isinstance(event, yaml.NodeEvent)
        tag = getattr(event, "tag", None)
        if tag not in (None, "!", "tag:yaml.org,2002:str"):
            raise YamlError(f"tag {shown(tag)} is not accepted; values get their types from the options", line)
        if event.anchor is not None:
            self._anchors[event.anchor] = None
        node = self._content(event, events, path, line)
        if event.anchor is not None:
            self._anchors[event.anchor] = node
        return node

    def _content(self, event: yaml.Event, events: Iterator[yaml.Event], path: tuple[str, ...], line: int) -> Node:
        if isinstance(event, yaml.ScalarEvent):
            return Scalar(event.value, event.style is None and event.tag is None, line)
        if isinstance(event, yaml.SequenceStartEvent):
            items = []
            while not isinstance(inner := next(events), yaml.SequenceEndEvent):
                items.append(self._node(inner, events, (*path, "[]")))
            return List(tuple(items), line)
        return self._table(events, path, line)

    def _table(self, events: Iterator[yaml.Event], path: tuple[str, ...], line: int) -> Table:
        items: dict[str, tuple[Scalar, Node]] = {}
        while not isinstance(inner := next(events), yaml.MappingEndEvent):
            key = self._node(inner, events, (*path, "?"))
            if not isinstance(key, Scalar):
                raise YamlError("a key must be a name", key.line)
            value = self._node(next(events), events, (*path, key.text))
            if key.text in items:
                where = f"{self._name}:{key.line}"
                first = items[key.text][0].line
                full = ".".join((*path, key.text))[:200]
                self._problems.add(where, f"{full}: given twice, first on line {first}; remove one")
            else:
                items[key.text] = (key, value)
        return Table(tuple(items.values()), line)


def _line(event: yaml.Event) -> int:
    return event.start_mark.line + 1 if event.start_mark else 1

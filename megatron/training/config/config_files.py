"""Configuration files to layers: sections, Megatron's sections and flat names, `base:` includes, `${ENV}`.

base: [model.yaml, data.yaml]      read first, relative to this file; this file's values win
model: {hidden_size: 768}          nested
language_model: {num_layers: 12}   Megatron's sections
lr: 1e-4                           flat
"""

import pathlib
from collections.abc import Mapping

from megatron.training.config.coerce import Text
from megatron.training.config.environment import expand
from megatron.training.config.layers import Layer, Unknown, look_up
from megatron.training.config.megatron_options import MEGATRON_BY_NAME
from megatron.training.config.options import BY_NAME, CONSTANT_NAMES, MEGATRON_SECTIONS, SECTIONS, Constant, Option
from megatron.training.config.problems import Problems, shown
from megatron.training.config.yaml_source import MAX_CHARACTERS, List, Node, Scalar, Table, YamlError, compose


class FileReader:
    """Reads files into `layers`, bases before the files that name them. What is wrong goes to `problems`."""

    def __init__(self, environment: Mapping[str, str], problems: Problems, notes: list[str]) -> None:
        self.layers: list[Layer] = []
        self.files: list[str] = []
        self._environment, self._problems, self._notes = environment, problems, notes
        self._open: list[pathlib.Path] = []

    def read(self, path: str, named_at: str = "") -> None:
        """Read a file and its bases. named_at: where its name was written, for messages."""
        text = self._text(path, named_at)
        if text is None:
            return
        resolved = pathlib.Path(path).resolve()
        if resolved in self._open:
            chain = " -> ".join(str(p) for p in [*self._open[self._open.index(resolved) :], resolved])
            self._problems.add(named_at or path, f"base: files include each other in a circle: {chain}")
            return
        self._open.append(resolved)
        try:
            self._read_text(text, path)
        finally:
            self._open.pop()

    def _text(self, path: str, named_at: str) -> str | None:
        try:
            file = pathlib.Path(path)
            if not file.is_file():
                reason = "is a folder" if file.is_dir() else "is not a regular file" if file.exists() else "does not exist"
                self._problems.add(named_at, f"configuration file {shown(path)} {reason}")
                return None
            with file.open("rb") as stream:
                data = stream.read(4 * MAX_CHARACTERS + 1)
        except (OSError, ValueError) as error:
            reason = str(error.strerror if isinstance(error, OSError) else error)
            self._problems.add(named_at, f"cannot read configuration file {shown(path)}: {reason}")
            return None
        try:
            return data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            self._problems.add(f"{path}:{line}", f"not UTF-8 text (byte {data[error.start]:#04x}); save the file as UTF-8")
            return None

    def _read_text(self, text: str, path: str) -> None:
        self.files.append(path)
        try:
            root = compose(text, path, self._problems)
        except YamlError as error:
            self._problems.add(path if error.line is None else f"{path}:{error.line}", str(error))
            return
        if root is None:
            self._problems.add(path, "the file is empty; it should hold options such as 'model:' or 'lr: 1e-4'")
        elif not isinstance(root, Table):
            self._problems.add(f"{path}:{root.line}", f"expected options as 'name: value', got {_kind(root)}")
        else:
            self._read_root(root, path)

    def _read_root(self, root: Table, path: str) -> None:
        for key, node in root.items:
            if key.text == "base":
                self._read_bases(node, path)
        layer = Layer(self._problems, self._notes)
        for key, node in root.items:
            if key.text == "base":
                continue
            is_section = key.text in SECTIONS or key.text in MEGATRON_SECTIONS
            if is_section and not (isinstance(node, (Scalar, List)) and key.text in BY_NAME):
                self._read_section(layer, key, node, path)
            else:
                self._read_option(layer, (key.text,), node, path, key.line)
        self.layers.append(layer)

    def _read_bases(self, node: Node, path: str) -> None:
        for item in node.items if isinstance(node, List) else (node,):
            where = f"{path}:{item.line}"
            if not isinstance(item, Scalar) or not item.text:
                self._problems.add(where, "base: expected the path of a file or a list of paths")
                continue
            text = self._expanded(item, "base", where)
            if text is not None:
                self.read(str(pathlib.Path(path).parent / text), named_at=where)

    def _read_section(self, layer: Layer, key: Scalar, node: Node, path: str) -> None:
        if isinstance(node, Scalar) and node.plain and node.text.lower() in ("", "null", "~"):
            return
        if not isinstance(node, Table):
            where = f"{path}:{node.line}"
            self._problems.add(where, f"{key.text}: is a section; expected options as 'name: value', got {_kind(node)}")
            return
        for inner, value in node.items:
            self._read_option(layer, (key.text, inner.text), value, path, inner.line)

    def _read_option(self, layer: Layer, keys: tuple[str, ...], node: Node, path: str, line: int) -> None:
        written, where = ".".join(keys)[:200], f"{path}:{line}"
        found = look_up(keys)
        if isinstance(found, Unknown):
            if keys[-1] in MEGATRON_BY_NAME:
                layer.put_megatron(MEGATRON_BY_NAME[keys[-1]], self._megatron_values(node, written, where), written, where)
            elif len(keys) == 2 and keys[0] in MEGATRON_SECTIONS and keys[1] in CONSTANT_NAMES:
                self._read_constant(layer, CONSTANT_NAMES[keys[1]], node, written, where)
            elif keys[-1] == "<<":
                self._problems.add(where, f"{written}: merge keys are not supported; include a file with base:")
            else:
                self._problems.add(where, f"{written}: {found.text}")
        elif isinstance(found, Constant):
            self._read_constant(layer, found, node, written, where)
        else:
            self._read_value(layer, found, node, written, where)

    def _read_value(self, layer: Layer, option: Option, node: Node, written: str, where: str) -> None:
        if isinstance(node, Table) or (isinstance(node, List) and not all(isinstance(item, Scalar) for item in node.items)):
            kind = _kind(node) if isinstance(node, Table) else "a list that holds more than plain values"
            layer.put_invalid(option, f"expected {option.expects}, got {kind}", written, where)
            return
        texts = []
        for item in node.items if isinstance(node, List) else (node,):
            assert isinstance(item, Scalar)
            text = self._expanded(item, written, where)
            if text is None:
                layer.put_unread(option, written, where)
                return
            texts.append(Text(text, item.plain))
        layer.put_text(option, texts if isinstance(node, List) else texts[0], written, where)

    def _read_constant(self, layer: Layer, constant: Constant, node: Node, written: str, where: str) -> None:
        """`swiglu: true` sets what `--swiglu` sets; false leaves the option as it is."""
        text = self._expanded(node, written, where) if isinstance(node, Scalar) else None
        if text is not None and text.lower() == "true":
            layer.put_constant(constant, written, where)
        elif text is None or text.lower() != "false":
            option = constant.option
            self._problems.add(where, f"{written}: expected true or false (true means {option.path}={constant.value})")

    def _megatron_values(self, node: Node, written: str, where: str) -> list[str]:
        if isinstance(node, List) and not node.items:
            return ["[]"]
        items = node.items if isinstance(node, List) else (node,)
        return [(self._expanded(item, written, where) or "") if isinstance(item, Scalar) else _kind(item) for item in items]

    def _expanded(self, node: Scalar, written: str, where: str) -> str | None:
        try:
            return expand(node.text, self._environment)
        except ValueError as error:
            self._problems.add(where, f"{written}: {error}")
            return None


def _kind(node: Node) -> str:
    """A node in words."""
    if isinstance(node, Table):
        return "a section"
    return f"a list of {len(node.items)}" if isinstance(node, List) else shown(node.text)

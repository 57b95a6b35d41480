"""The command line to layers: Megatron's flags, dotted flags, `--set`, and the few flags that are no options of the run.

Flags are exact: no abbreviations, no second time. `--flag value`, `--flag=value`, `--flag a b c` for lists, `--bf16` and
`--no-bf16` for booleans, `--optimizer.lr 1e-4` for any field.
"""

import dataclasses
from collections.abc import Sequence

from megatron.training.config.coerce import Text
from megatron.training.config.layers import Layer, Unknown, look_up
from megatron.training.config.megatron_options import MEGATRON_BY_FLAG, MEGATRON_BY_NAME
from megatron.training.config.options import FLAGS, MEGATRON_SECTIONS, SECTIONS, Constant, Option
from megatron.training.config.problems import Problems, did_you_mean, shown
from megatron.training.config.yaml_source import List, Scalar, YamlError, compose

# Flags of the command itself: with a value, and without.
VALUE_FLAGS = ("--config", "--yaml-cfg", "--set", "--help-config", "--world-size")
SWITCHES = ("--print-config", "--dry-run", "--help", "-h")
_REPEATABLE = ("--config", "--yaml-cfg", "--set")


@dataclasses.dataclass
class ParsedFlags:
    """What a command line says, before files are read."""

    flags: Layer
    sets: Layer
    configs: list[str] = dataclasses.field(default_factory=list)
    switches: set[str] = dataclasses.field(default_factory=set)
    help_config: str | None = None
    world_size: int | None = None


@dataclasses.dataclass(frozen=True)
class _Occurrence:
    """One flag with what follows it. attached: the value came as `--flag=value`."""

    flag: str
    values: tuple[str, ...]
    attached: bool


def parse_flags(argv: Sequence[str], problems: Problems, notes: list[str]) -> ParsedFlags:
    """Sort the command line into layers; wrong flags go to `problems`."""
    parsed = ParsedFlags(Layer(problems, notes), Layer(problems, notes))
    seen: set[str] = set()
    for use in _occurrences(argv, problems):
        if use.flag in VALUE_FLAGS or use.flag in SWITCHES:
            if use.flag in seen and use.flag not in _REPEATABLE:
                problems.add(use.flag, "given twice; remove one")
            seen.add(use.flag)
            _command_flag(parsed, use, problems)
        else:
            _option_flag(parsed.flags, use, problems)
    return parsed


def ranks_from_text(text: str) -> int | None:
    """A number of ranks >= 1, None if the text is none."""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 9 and int(text) else None


def _occurrences(argv: Sequence[str], problems: Problems) -> list[_Occurrence]:
    """Flags, each with the words up to the next flag."""
    found: list[_Occurrence] = []
    words: list[str] = []
    for word in reversed(argv):
        if word == "-h" or (word.startswith("--") and len(word) > 2):
            flag, equals, value = word.partition("=")
            if equals and words:
                problems.add(flag, f"{_unexpected(words[-1])} after {shown(word)}")
            if flag == "--help-config" and not equals and not words and found:
                words = [found.pop().flag]  # the option to explain may be named by its flag
            found.append(_Occurrence(flag, (value,) if equals else tuple(reversed(words)), bool(equals)))
            words = []
        else:
            words.append(word)
    for word in reversed(words):
        problems.add("", _unexpected(word))
    return found[::-1]


def _unexpected(word: str) -> str:
    hint = "options start with two dashes" if word.startswith("-") else "options are given as --name value"
    return f"unexpected argument {shown(word)} ({hint})"


def _command_flag(parsed: ParsedFlags, use: _Occurrence, problems: Problems) -> None:
    if use.flag in SWITCHES:
        parsed.switches.add("--help" if use.flag == "-h" else use.flag)
        if use.values:
            problems.add(use.flag, f"takes no value, got {shown(use.values[0])}")
    elif not use.values or (len(use.values) > 1 and use.flag != "--set"):
        problems.add(use.flag, f"needs {'a value' if not use.values else 'exactly one value'}, got {len(use.values)}")
    elif use.flag == "--set":
        for assignment in use.values:
            _assignment(parsed.sets, assignment, problems)
    elif use.flag == "--help-config":
        parsed.help_config = use.values[0]
    elif use.flag == "--world-size":
        parsed.world_size = ranks_from_text(use.values[0])
        if parsed.world_size is None:
            problems.add(use.flag, f"expected a number of ranks of at least 1, got {shown(use.values[0])}")
    else:
        parsed.configs.append(use.values[0])


def _option_flag(layer: Layer, use: _Occurrence, problems: Problems) -> None:
    found = FLAGS.get(use.flag)
    if found is None and "." in use.flag:
        dotted = look_up(use.flag[2:].split("."))
        if isinstance(dotted, Unknown):
            problems.add(use.flag, dotted.text)
        else:
            _give(layer, dotted, use)
    elif isinstance(found, Constant):
        _switch(layer, found, use)
    elif found is not None:
        _give(layer, found, use)
    elif use.flag in MEGATRON_BY_FLAG:
        layer.put_megatron(MEGATRON_BY_FLAG[use.flag], list(use.values), use.flag, use.flag)
    else:
        known = [*FLAGS, *VALUE_FLAGS, *SWITCHES, *MEGATRON_BY_FLAG]
        problems.add(use.flag[:200], f"unknown option{_flag_hint(use.flag, known)}")


def _flag_hint(flag: str, known: list[str]) -> str:
    dashed = flag.replace("_", "-")
    return f"; did you mean {dashed}?" if dashed in known else did_you_mean(flag, known)


def _switch(layer: Layer, constant: Constant, use: _Occurrence) -> None:
    """`--bf16`, `--no-bf16`, `--swiglu`; a boolean's own flag also takes `--bf16=false`."""
    option = constant.option
    if use.attached and option.scalar is bool and constant.value is True:
        layer.put_text(option, Text(use.values[0], literal=True), use.flag, use.flag)
    elif use.values:
        form = f"; write {use.flag}={use.values[0]}" if option.scalar is bool and constant.value is True else ""
        layer.put_invalid(option, f"takes no value, got {shown(use.values[0])}{form}", use.flag, use.flag)
    else:
        layer.put_constant(constant, use.flag, use.flag)


def _give(layer: Layer, option: Option | Constant, use: _Occurrence) -> None:
    assert isinstance(option, Option)
    texts = [Text(value, literal=True) for value in use.values]
    if not texts:
        layer.put_invalid(option, f"needs a value: {option.expects}", use.flag, use.flag)
    elif len(texts) == 1:
        layer.put_text(option, texts[0], use.flag, use.flag)
    elif option.many:
        layer.put_text(option, texts, use.flag, use.flag)
    else:
        layer.put_invalid(option, f"takes one value, unexpected {shown(use.values[1])}", use.flag, use.flag)


def _assignment(layer: Layer, text: str, problems: Problems) -> None:
    """`--set a.b=c`; a list as `[x, y]`, a text that looks like another type in quotes."""
    origin = f"--set {text if len(text) <= 80 else text[:77] + '...'}"
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals:
        problems.add(origin, "expected name=value, such as optimizer.lr=1e-4")
        return
    keys = key.split(".")
    found = look_up(keys)
    if isinstance(found, Unknown):
        known = MEGATRON_BY_NAME.get(keys[-1])
        if known is not None and (len(keys) == 1 or keys[0] in SECTIONS or keys[0] in MEGATRON_SECTIONS):
            layer.put_megatron(known, [value], key, origin)
        else:
            problems.add(origin, f"{key[:200]}: {found.text}")
        return
    if isinstance(found, Constant):
        option, reason = found.option, f"is a flag; set {found.option.path}={found.value}"
        layer.put_invalid(option, reason, key, origin)
        return
    _assign(layer, found, key, value.strip(), origin)


def _assign(layer: Layer, option: Option, key: str, value: str, origin: str) -> None:
    if value[:1] not in ("[", '"', "'"):
        layer.put_text(option, Text(value, literal=True), key, origin)
        return
    try:
        node = compose(value, origin, layer.problems)
    except YamlError as error:
        layer.put_invalid(option, str(error), key, origin)
        return
    if isinstance(node, Scalar):
        layer.put_text(option, Text(node.text, node.plain), key, origin)
    elif isinstance(node, List) and all(isinstance(item, Scalar) for item in node.items):
        layer.put_text(option, [Text(i.text, i.plain) for i in node.items if isinstance(i, Scalar)], key, origin)
    else:
        layer.put_invalid(option, f"expected {option.expects}, got {shown(value)}", key, origin)

"""The code's imports agree with the picture: downwards only, no globals in core, no hidden imports, no pickle, no private paths."""

import ast
import pathlib
import re
from collections.abc import Iterator

import pytest

from tests.architecture.layers import FACADES, GLOBALS, OPTIONAL_PACKAGES, level_of

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCES = [*sorted((ROOT / "megatron").rglob("*.py")), *sorted((ROOT / "tools").glob("*.py")), ROOT / "pretrain_gpt.py"]
OURS = ("megatron", "tools", "tests", "pretrain_gpt")


def module_name(path: pathlib.Path) -> str:
    """Dotted name of a source file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in SOURCES}


def imports(tree: ast.AST) -> Iterator[tuple[ast.stmt, str]]:
    """(statement, imported module) for every import; `from package import module` counts as the module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield node, inner if inner in MODULES else str(node.module)


def inner_imports(tree: ast.AST) -> Iterator[tuple[ast.stmt, str]]:
    """Imports inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from imports(node)


def parsed(path: pathlib.Path) -> ast.AST:
    """Syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down_only(module: str) -> None:
    for node, imported in imports(parsed(MODULES[module])):
        if imported.split(".")[0] not in OURS or imported == module:
            continue
        assert not imported.startswith("tests"), f"{module}:{node.lineno} imports {imported}"
        own, theirs = level_of(module), level_of(imported)
        if imported in GLOBALS and module in FACADES:
            continue
        is_package = MODULES[module].name == "__init__.py"  # a package's face shows what is inside it
        if not (is_package and imported.startswith(module)):
            assert theirs <= own, f"{module} (level {own}) line {node.lineno} imports {imported} (level {theirs})"


@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith("megatron.core")])
def test_core_never_imports_training(module: str) -> None:
    assert not [name for _, name in imports(parsed(MODULES[module])) if name.startswith(("megatron.training", "tools"))]


@pytest.mark.parametrize("module", MODULES)
def test_globals_are_read_by_facades_and_entry_points_alone(module: str) -> None:
    found = [name for _, name in imports(parsed(MODULES[module])) if name in GLOBALS]
    assert not found or module in FACADES or level_of(module) == 7, f"{module} reads {found}"


@pytest.mark.parametrize("module", MODULES)
def test_imports_inside_functions_are_of_optional_packages_only(module: str) -> None:
    for node, imported in inner_imports(parsed(MODULES[module])):
        package = imported.split(".")[0]
        allowed = package in OPTIONAL_PACKAGES or imported.startswith("torch.utils.tensorboard") or "core.backends" in module
        assert allowed and package not in OURS, f"{module}:{node.lineno} imports {imported} inside a function"


@pytest.mark.parametrize("module", [name for name in MODULES if not name.startswith("megatron.core.backends")])
def test_gpu_packages_are_imported_in_backends_only(module: str) -> None:
    found = [name for _, name in imports(parsed(MODULES[module])) if name.split(".")[0] in ("apex", "flash_attn", "transformer_engine")]
    assert not found, f"{module} imports {found}"


@pytest.mark.parametrize("module", [name for name in MODULES if "checkpoint" in name or name == "megatron.training.saved_model"])
def test_checkpoints_are_read_without_pickle(module: str) -> None:
    text = MODULES[module].read_text(encoding="utf-8")
    assert not re.search(r"\bimport pickle\b|torch\.load\(|pickle\.loads?\(", text), module


def test_pure_plans_do_not_communicate() -> None:
    for module in MODULES:
        if module.startswith("megatron") and level_of(module) <= 1 and module not in (
            "megatron.core.collectives", "megatron.core.process_groups_config", "megatron.core.mpu", "megatron.core"
        ):  # fmt: skip
            assert "torch.distributed" not in MODULES[module].read_text(encoding="utf-8"), module


def test_files_name_no_private_path_and_no_registry() -> None:
    pattern = re.compile("|".join((r"/work/", r"pypi\.org", r"pythonhosted", r"deb\.debian", r"npmjs\.org")))
    for path in ROOT.rglob("*"):
        parts = path.relative_to(ROOT).parts
        if path == pathlib.Path(__file__) or not path.is_file() or any(part.startswith(".") for part in parts[:-1]) or "runs" in parts:
            continue
        if path.suffix in (".py", ".md", ".sh", ".yaml", ".toml", ".sbatch", ".json"):
            assert not pattern.search(path.read_text(encoding="utf-8")), path

"""The commands that README and docs show are run as they stand, in a copy of the project; links lead somewhere."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#]+)")
OWN_TESTS = ("scripts/quickstart.sh", "scripts/run_tests.sh")  # the quickstart has its own test below; the suite cannot run itself


@pytest.fixture
def copy(tmp_path: pathlib.Path) -> pathlib.Path:
    """The project without its outputs."""
    ignored = shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", "*.egg-info", ".*_cache", ".hypothesis")
    return pathlib.Path(shutil.copytree(ROOT, tmp_path / "project", ignore=ignored))


def shell(command: str, folder: pathlib.Path, timeout: float = 280.0, **environment: str) -> "subprocess.CompletedProcess[str]":
    """bash with this interpreter first on PATH, stopping at the first failure."""
    path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(folder), **environment}
    return subprocess.run(["bash", "-euo", "pipefail", "-c", command], cwd=folder, env=env, text=True, capture_output=True, timeout=timeout)


def commands(page: pathlib.Path) -> list[str]:
    """The page's shell blocks in order, without those that have a test of their own."""
    return [block for block in BLOCK.findall(page.read_text(encoding="utf-8")) if not any(name in block for name in OWN_TESTS)]


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.name)
def test_commands_of_a_page_run(page: pathlib.Path, copy: pathlib.Path) -> None:
    for command in commands(page):
        result = shell(command, copy)
        assert result.returncode == 0, f"{command}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_of_a_page_lead_to_files(page: pathlib.Path) -> None:
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


def test_quickstart_trains_survives_a_kill_and_speaks(copy: pathlib.Path) -> None:
    environment = dict(RUN=str(copy / "out"), VIRTUAL_ENV=sys.prefix, QUICKSTART_FLAGS="--train-iters 30 --save-interval 10 --eval-interval 15")
    result = shell("bash scripts/quickstart.sh", copy, **environment)
    text = result.stdout + result.stderr
    assert result.returncode == 0, text[-4000:]
    assert "killed all ranks" in text and "unigram entropy" in text and "iteration       30/" in text
    assert (copy / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")

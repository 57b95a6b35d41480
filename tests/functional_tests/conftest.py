"""What the functional tests share."""

import pathlib

import pytest

from tests.harness.d0 import write_d0


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """D0 on disk: its prefix."""
    prefix = tmp_path_factory.mktemp("d0") / "d0"
    write_d0(str(prefix))
    return prefix

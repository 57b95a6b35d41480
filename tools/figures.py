"""Pictures that tools write: whole or not at all."""

import os
from pathlib import Path
from typing import Any


def save_png(figure: Any, path: str | Path) -> Path:
    """Write a matplotlib figure; its folder is made, and an older picture stays until the new one is complete."""
    output = Path(path)
    output.parent.mkdir(parents=True, exist_ok=True)
    temporary = output.with_name(f"{output.name}.tmp")
    figure.savefig(temporary, format="png")
    os.replace(temporary, output)
    return output

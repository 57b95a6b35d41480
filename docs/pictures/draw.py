"""Draws the pictures of the documentation: `python docs/pictures/draw.py` writes the PNG files beside this script."""

import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Rectangle

HERE = pathlib.Path(__file__).parent
INK, GREY = "#1f2933", "#7b8794"
BLUE, GREEN, AMBER, RED, VIOLET, SAND = "#4c78a8", "#54a24b", "#f2a541", "#d1605e", "#8c6bb1", "#e8e4da"


def box(ax: Axes, x: float, y: float, w: float, h: float, text: str, color: str, size: float = 9, ink: str = "white") -> None:
    """A rounded, labelled box."""
    ax.add_patch(FancyBboxPatch((x, y), w, h, boxstyle="round,pad=0,rounding_size=0.08", fc=color, ec="none"))
    ax.text(x + w / 2, y + h / 2, text, ha="center", va="center", fontsize=size, color=ink)


def canvas(width: float, height: float) -> tuple[plt.Figure, Axes]:
    """An empty page."""
    figure, ax = plt.subplots(figsize=(width, height))
    ax.axis("off")
    return figure, ax


def layers() -> None:
    """Who may import whom."""
    rows = [
        ("entry", ["pretrain_gpt.py", "tools/"], RED),
        ("training", ["config", "trainer", "objectives", "checkpointing", "metrics, loggers"], VIOLET),
        ("serving", ["inference"], BLUE),
        ("models", ["models/gpt"], BLUE),
        ("assemblies", ["transformer", "optimizer"], BLUE),
        ("engines", ["tensor_parallel", "distributed", "dist_checkpointing", "datasets", "tokenizers"], GREEN),
        ("tools", ["collectives", "backends", "pure plans: param_layout, shard_map, reshard, sampler"], AMBER),
        ("facts", ["configs", "rank_grid", "process groups", "param_meta", "errors"], GREY),
    ]
    figure, ax = canvas(9.5, 5.4)
    ax.set_xlim(0, 12)
    ax.set_ylim(-0.2, len(rows))
    for index, (name, parts, color) in enumerate(rows):
        y = len(rows) - 1 - index
        ax.text(0.1, y + 0.4, f"{y}  {name}", va="center", fontsize=10, color=INK, weight="bold")
        total, x = sum(max(len(p), 8) for p in parts), 2.0
        for part in parts:
            width = 9.8 * max(len(part), 8) / total - 0.12
            box(ax, x, y + 0.08, width, 0.66, part, color)
            x += width + 0.12
    ax.annotate("", xy=(11.95, 0.1), xytext=(11.95, len(rows) - 0.2), arrowprops=dict(arrowstyle="-|>", color=INK))
    ax.text(11.75, len(rows) - 0.13, "imports go down only", ha="right", va="center", fontsize=8.5, color=INK, style="italic")
    figure.savefig(HERE / "layers.png", dpi=130, bbox_inches="tight")


def buffer() -> None:
    """Parameters -> buffer -> buckets -> shards of two ranks."""
    figure, ax = canvas(10, 3.9)
    ax.set_xlim(-2.6, 22.2)
    ax.set_ylim(0, 6.6)
    names = [("output", 4, BLUE), ("layer 1", 5, GREEN), ("layer 0", 5, GREEN), ("embedding", 4, BLUE)]
    x = 3.0
    ax.text(-2.5, 5.6, "parameters in\nbackward order", fontsize=9, color=INK, va="center")
    starts = []
    for name, width, color in names:
        box(ax, x, 5.2, width - 0.1, 0.8, name, color)
        starts.append(x)
        x += width + (0.4 if name == "layer 1" else 0)
    ax.text(-2.5, 3.5, "grad buffer\n(contiguous)", fontsize=9, color=INK, va="center")
    for start, label in ((3.0, "bucket 0"), (12.4, "bucket 1")):
        ax.add_patch(Rectangle((start, 3.1), 9.4, 0.8, fc=SAND, ec=INK, lw=0.8))
        ax.add_patch(Rectangle((start + 8.9, 3.1), 0.5, 0.8, fc="white", ec=INK, lw=0.8, hatch="////"))
        ax.text(start + 4.4, 3.5, label, ha="center", va="center", fontsize=9, color=INK)
    ax.text(21.95, 4.15, "padding", fontsize=8, color=GREY, ha="right")
    ax.text(-2.5, 1.3, "shards: fp32 main\nparams and moments", fontsize=9, color=INK, va="center")
    for start in (3.0, 12.4):
        for rank, color in ((0, AMBER), (1, RED)):
            left = start + 4.7 * rank
            box(ax, left, 0.9, 4.6, 0.8, f"rank {rank}", color)
            ax.plot([left, left], [1.75, 3.1], color=GREY, lw=0.7, ls=":")
            ax.plot([left + 4.7, left + 4.7], [1.75, 3.1], color=GREY, lw=0.7, ls=":")
    ax.text(12.4, 2.4, "reduce-scatter of gradients  ↓      ↑  all-gather of parameters", ha="center", fontsize=9, color=INK, style="italic")
    ax.text(12.4, 0.25, "a shard boundary may fall inside a parameter; shard_map says which range of which parameter a rank owns", ha="center", fontsize=8.5, color=GREY)
    figure.savefig(HERE / "buffer.png", dpi=130, bbox_inches="tight")


def step() -> None:
    """One step on a time axis: what hides under what."""
    figure, ax = canvas(12, 3.5)
    ax.set_xlim(-2.4, 18.6)
    ax.set_ylim(0, 4.6)
    for y, name in ((3.3, "compute"), (1.9, "network")):
        ax.text(-2.3, y + 0.35, name, fontsize=10, color=INK, weight="bold", va="center")
    compute = [("fwd 0", 1.2, BLUE), ("fwd 1", 1.2, BLUE), ("head", 1.0, BLUE), ("bwd\nhead", 1.4, VIOLET), ("bwd 1", 2.4, VIOLET),
               ("bwd 0", 2.4, VIOLET), ("norm", 1.5, GREY), ("Adam\nb1", 1.5, GREEN), ("Adam\nb0", 1.5, GREEN), ("fwd 0", 1.8, BLUE), ("fwd 1", 1.8, BLUE)]  # fmt: skip
    x = 0.0
    for name, width, color in compute:
        box(ax, x, 3.3, width - 0.06, 0.7, name, color, 8)
        x += width
    for name, start, width, color in (
        ("reduce-\nscatter b0", 7.2, 2.4, AMBER),
        ("r.-s.\nb1", 9.65, 1.3, AMBER),
        ("gather\nb1", 12.6, 1.6, RED),
        ("gather\nb0", 14.2, 1.6, RED),
    ):
        box(ax, start, 1.9, width - 0.06, 0.7, name, color, 8)
    ax.annotate("bucket 0 is full:\nits reduction starts", xy=(7.2, 2.6), xytext=(3.0, 0.7), fontsize=8.5, color=INK, arrowprops=dict(arrowstyle="->", color=GREY))
    ax.annotate("bucket 1's shard is written:\nits gather starts, bucket 0 is updated meanwhile", xy=(12.6, 1.95), xytext=(6.6, 0.35), fontsize=8.5, color=INK, arrowprops=dict(arrowstyle="->", color=GREY))
    ax.annotate("layer 1's forward waits here\nonly if bucket 0 is late", xy=(17.3, 3.3), xytext=(15.2, 0.6), fontsize=8.5, color=INK, arrowprops=dict(arrowstyle="->", color=GREY))
    ax.text(0, 4.35, "last microbatch of step k", fontsize=9, color=GREY)
    ax.plot([14.1, 14.1], [1.6, 4.5], color=INK, lw=0.8, ls="--")
    ax.text(14.25, 4.35, "step k + 1", fontsize=9, color=GREY)
    figure.savefig(HERE / "step.png", dpi=130, bbox_inches="tight")


if __name__ == "__main__":
    layers()
    buffer()
    step()

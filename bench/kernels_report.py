"""What the Triton kernels become on sm_90 and sm_120, and what share of `linear_divergence` is left to the GEMMs: `make kernels-report`.

Compiles the shipped configurations ahead of time (no GPU needed) and prints Markdown. The roofline counts bytes and FLOPs from shapes;
its ceilings are stated, and no time in it was measured.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "kernels"))

from test_aot import ARCHITECTURES, FORMS, compile_rows
from test_ttt_attention_aot import FLASH, compiled

from eagle3_fast.kernels import linear_divergence, ttt_attention
from eagle3_fast.testing.aot import Compiled

HEADER = "| kernel | configuration | arch | registers | shared, bytes | stack | CTAs per SM | matrix instructions | 128-bit loads |"


@dataclass(frozen=True)
class Card:
    """Rates a library reaches: dense bf16 FLOP/s of a large GEMM, bytes/s of memory. RTX PRO 6000 Blackwell and H100 SXM, published."""

    name: str
    flops: float
    bandwidth: float


CARDS = (Card("RTX PRO 6000 (400 TFLOP/s, 1.5 TB/s)", 400e12, 1.5e12), Card("H100 SXM (720 TFLOP/s, 3.0 TB/s)", 720e12, 3.0e12))


def row_kernels() -> Iterator[str]:
    for config in linear_divergence.CONFIGS:
        for form in FORMS:
            for arch in ARCHITECTURES:
                what = f"V up to {config.vocab}: {config.block} columns, {config.num_warps} warps, {form}"
                yield line("row pass", what, compile_rows(config, form, arch))


def attention_kernels() -> Iterator[str]:
    for arch, table in ttt_attention.TILES.items():
        for size in table:
            for name, tile in zip(FLASH, ttt_attention.tiles(size, element_bytes=2, arch=arch), strict=True):
                what = f"head {size}: {tile.rows} x {tile.keys}, {tile.warps} warps, {tile.stages} stages"
                yield line(f"attention, {name}", what, compiled(FLASH[name], size, arch, tile))


def line(kernel: str, what: str, figures: Compiled) -> str:
    if figures.local_in_loops:
        raise SystemExit(f"{kernel}, {what}: {figures.local_in_loops} local-memory accesses in loops")
    matrix = f"{figures.wgmma} wgmma" if figures.wgmma else f"{figures.mma} mma.sync" if figures.mma else "-"
    columns = (figures.registers, figures.shared, figures.stack, figures.ctas_per_sm, matrix, f"{figures.wide_load_share:.0%}")
    return f"| {kernel} | {what} | sm_{figures.arch} | " + " | ".join(map(str, columns)) + " |"


def gemm_share(card: Card, hidden: int, steps: int, frozen: bool, rereads: int) -> float:
    """Time of the GEMMs over time of the op, per vocabulary entry and draft row, both at their ceilings.

    FLOPs: logits and hidden gradient, head gradient where it is trained, a verifier row's logits shared by `steps` draft rows. Bytes
    of the row pass in bf16: each logit read `rereads` times and written once, a verifier row read twice for its `steps` draft rows.
    """
    gemms = (2 * (2 if frozen else 3) + 2 / steps) * hidden / card.flops
    rows = 2 * (rereads + 1 + 2 / steps) / card.bandwidth
    return gemms / (gemms + rows)


def roofline() -> Iterator[str]:
    for card in CARDS:
        for hidden in (1024, 2048, 4096, 6144):
            for frozen in (True, False):
                shares = [f"{gemm_share(card, hidden, steps, frozen, rereads):.3f}" for steps in (3, 7) for rereads in (1, 2)]
                yield f"| {card.name} | {hidden} | {'frozen' if frozen else 'trained'} | " + " | ".join(shares) + " |"


def main() -> None:
    print("## Shipped configurations, compiled ahead of time\n", HEADER, "|---" * 9 + "|", sep="\n")
    for text in (*row_kernels(), *attention_kernels()):
        print(text, flush=True)
    print("\n## `linear_divergence`: predicted share of the GEMMs\n")
    print("Logits read once from memory where the second sweep finds them in the L2 cache, twice where it does not.\n")
    print("| card (ceilings) | H | head | T 3, once | T 3, twice | T 7, once | T 7, twice |", "|---" * 7 + "|", sep="\n")
    print("\n".join(roofline()))


if __name__ == "__main__":
    main()

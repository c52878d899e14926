"""The kernels of `ttt_attention` as machine code for sm_90 and sm_120: every shipped tile fits, multiplies by matrix units, spills nothing.

Registers and spills do not follow from the tile by any rule, so the compiled code is asked. That takes four seconds a kernel where
triton's cache is cold, so less than half of the table is checked always, all of it with EAGLE3_FAST_AOT=all.
"""

from __future__ import annotations

import os

import pytest

pytest.importorskip("triton", reason="the kernels are written in Triton, which is not installed here")

from eagle3_fast.testing.aot import Compiled, assert_fits, compile_kernel

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels have no machine code", allow_module_level=True)

from eagle3_fast.kernels import ttt_attention as kernels

MATRIX, NUMBERS, INDICES = "*bf16", "*fp32", "*i32"
TYPES = {
    **dict.fromkeys(("q", "k", "v", "out", "grad_out", "grad_q", "grad_k", "grad_v"), MATRIX),
    **dict.fromkeys(("lse", "statistics", "grad_score"), NUMBERS),
    **dict.fromkeys(("key_range", "lo_hi", "seen_by", "own_rows"), INDICES),
    **dict.fromkeys(("queries", "keys", "query_heads", "key_heads", "steps"), "i32"),
    "own": "*i64",
    "scale": "fp32",
}
FLASH = {"forward": kernels.forward_kernel, "keys": kernels.key_gradients_kernel, "queries": kernels.query_gradients_kernel}
ALWAYS = {(90, 64), (90, 192), (120, 80), (120, 128), (120, 256)}
SHIPPED = [
    (arch, size)
    for arch, table in kernels.TILES.items()
    for size in table
    if (arch, size) in ALWAYS or os.environ.get("EAGLE3_FAST_AOT") == "all"
]


def compiled(kernel, head_size: int, arch: int, tile: kernels.Tile, **changes) -> Compiled:
    constants = {**kernels.sizes(head_size, head_size), "ROWS": tile.rows, "KEYS": tile.keys}
    types = {name: kind for name, kind in TYPES.items() if name in kernel.arg_names}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    return compile_kernel(kernel, types, constants, arch=arch, num_warps=tile.warps, num_stages=tile.stages, **changes)


@pytest.mark.parametrize("name", FLASH)
@pytest.mark.parametrize(("arch", "head_size"), SHIPPED)
def test_shipped_tile(name: str, arch: int, head_size: int) -> None:
    tile = kernels.tiles(head_size, element_bytes=2, arch=arch)[list(FLASH).index(name)]
    figures = compiled(FLASH[name], head_size, arch, tile)
    print(name, head_size, tile, figures)
    assert_fits(figures, f"{name} at head size {head_size}, {tile}")
    assert figures.wgmma if arch == 90 and tile.rows * tile.keys > 32 * 32 else figures.mma, figures
    # The key gradients also read range, log-sum-exp and delta of every row; 16 columns over 8 warps are 64 bits a thread.
    assert figures.wide_load_share >= (0.4 if name == "keys" else 0.6 if head_size == 80 else 0.9), figures


@pytest.mark.parametrize("arch", [90, 120])
def test_own_keys_fit_at_the_largest_head(arch: int) -> None:
    figures = compiled(kernels.own_gradients_kernel, 256, arch, kernels.Tile(kernels.OWN_ROWS, 0, 4, 3))
    assert_fits(figures, "gradients of own keys")
    assert figures.wide_load_share >= 0.5, figures  # half of the loads: two statistics for two tiles


def test_a_tile_too_large_is_noticed() -> None:
    figures = compiled(kernels.forward_kernel, 64, 120, kernels.Tile(64, 128, 4, 4))
    with pytest.raises(AssertionError, match="shared memory"):
        assert_fits(figures, "too large")

"""Rows of a matrix that a verifier stores quantised, as bfloat16: select the rows first, then dequantise only those.

Layouts, `stem` being the parameter's name without ".weight":

    float8  stem.weight float8_e4m3fn [V, G] with stem.weight_scale or stem.weight_scale_inv: one value, one per row, or one per
            128 x 128 block. All multiply (the "_inv" of DeepSeek's files is the inverse of the *quantising* scale).
    NVFP4   two 4-bit floats per byte, low nibble first, a float8 scale for every 16 columns, and one float32 scale:
            compressed-tensors: stem.weight_packed, stem.weight_scale, stem.weight_global_scale (divides)
            ModelOpt:           stem.weight,        stem.weight_scale, stem.weight_scale_2      (multiplies)
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle3_fast.errors import InputError
from eagle3_fast.extract.checkpoint import Checkpoint

FP8_BLOCK = 128
FP4_BLOCK = 16
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)  # e2m1, sign in bit 3


def read_rows(checkpoint: Checkpoint, stem: str, rows: Tensor | None) -> Tensor:
    """`stem`'s matrix, or its `rows` (int64 [R]), as [R, G]: in its stored dtype if that is a plain float, else bfloat16.

    Raises InputError, naming tensor, dtype and shape, for a layout that is not listed above.
    """
    packed = f"{stem}.weight_packed" in checkpoint.files
    name = f"{stem}.weight_packed" if packed else f"{stem}.weight"
    weight = checkpoint.tensor(name)
    if weight.dtype in (torch.float32, torch.bfloat16, torch.float16):
        return weight if rows is None else weight[rows]
    picked = torch.arange(weight.shape[0]) if rows is None else rows
    if weight.dtype == torch.float8_e4m3fn and weight.ndim == 2:
        scale = _fp8_scale(checkpoint, stem, weight, picked)
        if scale is not None:
            return (weight.view(torch.uint8)[picked].view(torch.float8_e4m3fn).float() * scale).bfloat16()
    if weight.dtype == torch.uint8 and weight.ndim == 2:
        scale = _fp4_scale(checkpoint, stem, weight, picked, packed)
        if scale is not None:
            return (_unpack_fp4(weight[picked]) * scale).bfloat16()
    extra = {key: checkpoint.shape(key) for key in checkpoint.files if key.startswith(f"{stem}.") and key != name}
    raise InputError(
        f"{checkpoint.folder}: {name} is stored in a layout that is not supported: {weight.dtype}, shape "
        f"{tuple(weight.shape)}, beside it {extra or 'nothing'}; use a verifier whose head and embedding are not quantised"
    )


def _fp8_scale(checkpoint: Checkpoint, stem: str, weight: Tensor, rows: Tensor) -> Tensor | None:
    """float32 scale that broadcasts over weight[rows], or None when there is none of a known shape."""
    names = [name for name in (f"{stem}.weight_scale", f"{stem}.weight_scale_inv") if name in checkpoint.files]
    if not names:
        return None
    scale = checkpoint.tensor(names[0]).float()
    height, width = weight.shape
    if scale.numel() == 1:
        return scale.reshape(())
    if tuple(scale.shape) in ((height,), (height, 1)):
        return scale.reshape(height, 1)[rows]
    if tuple(scale.shape) == (-(-height // FP8_BLOCK), -(-width // FP8_BLOCK)):
        return scale[rows // FP8_BLOCK].repeat_interleave(FP8_BLOCK, dim=1)[:, :width]
    return None


def _fp4_scale(checkpoint: Checkpoint, stem: str, weight: Tensor, rows: Tensor, packed: bool) -> Tensor | None:
    """float32 scale [R, G] of NVFP4 rows, or None when the scales are not those of a known layout."""
    block_name, whole_name = f"{stem}.weight_scale", f"{stem}.weight_global_scale" if packed else f"{stem}.weight_scale_2"
    if block_name not in checkpoint.files or whole_name not in checkpoint.files:
        return None
    block, whole = checkpoint.tensor(block_name), checkpoint.tensor(whole_name).float()
    height, width = weight.shape[0], weight.shape[1] * 2
    if block.dtype != torch.float8_e4m3fn or tuple(block.shape) != (height, width // FP4_BLOCK) or whole.numel() != 1:
        return None
    scale = block.view(torch.uint8)[rows].view(torch.float8_e4m3fn).float()
    scale = scale / whole.reshape(()) if packed else scale * whole.reshape(())
    return scale.repeat_interleave(FP4_BLOCK, dim=1)


def _unpack_fp4(packed: Tensor) -> Tensor:
    """uint8 [R, G / 2] to float32 [R, G]."""
    nibbles = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
    return torch.tensor(FP4_VALUES)[nibbles.long()]

"""The two ops that carry the project, each with its contract: schema, shapes, gradient, validation, documented function."""

from eagle3_fast.ops._dispatch import select
from eagle3_fast.ops.linear_divergence import LinearDivergence, linear_divergence
from eagle3_fast.ops.ttt_attention import ttt_attention

__all__ = ["LinearDivergence", "linear_divergence", "select", "ttt_attention"]

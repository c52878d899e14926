"""Small random drafts and packed batches for the tests of model, training and serving."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from eagle3_fast.model.config import parse_draft_config
from eagle3_fast.model.draft import Draft
from eagle3_fast.records import PackedBatch

LAYER: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def config_data(layer: dict[str, Any] | None = None, **flags: Any) -> dict[str, Any]:
    """A draft's config.json as a dict."""
    return {
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 24,
        "norm_before_residual": True,
        "norm_before_fc": True,
        "norm_output": True,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "verifier", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": {**LAYER, **(layer or {})},
        **flags,
    }


def random_draft(
    layer: dict[str, Any] | None = None, train_head: bool = False, dtype: torch.dtype = torch.float64, **flags: Any
) -> Draft:
    """Every parameter drawn at random, norms included, so that none can be forgotten unseen."""
    draft = Draft(parse_draft_config(config_data(layer, **flags), "test"), train_head)
    draw = torch.Generator().manual_seed(0)
    for name, value in draft.named_parameters():
        scale = 1.0 if "norm" in name else 0.3
        value.data = torch.randn(value.shape, generator=draw) * scale + (1.0 if "norm" in name else 0.0)
    if draft.config.reduced_vocab:
        ids = torch.randperm(64, generator=draw)[: draft.config.draft_vocab_size].sort().values
        draft.d2t.copy_(ids - torch.arange(len(ids)))
        draft.t2d[ids] = True
    return draft.to(dtype)


def random_batch(
    documents: tuple[int, ...], size: int, num_aux: int = 3, hidden: int = 32, dtype: torch.dtype = torch.float64, seed: int = 0
) -> PackedBatch:
    """Documents of the given row counts, then padding; each begins with an unsupervised third."""
    draw = torch.Generator().manual_seed(seed)
    used = sum(documents)

    def padded(values: Tensor, fill: int = 0) -> Tensor:
        return torch.cat((values, values.new_full((size - used, *values.shape[1:]), fill)))

    return PackedBatch(
        input_ids=padded(torch.randint(64, (used,), generator=draw)),
        aux_hidden_states=padded(torch.randn(used, num_aux * hidden, generator=draw).to(dtype)),
        last_hidden_states=padded(torch.randn(used, hidden, generator=draw).to(dtype)),
        loss_mask=padded(torch.cat([(torch.arange(n) >= n // 3).long() for n in documents])),
        position_ids=padded(torch.cat([torch.arange(1, n + 1) for n in documents])),
        document_ids=padded(torch.repeat_interleave(torch.arange(len(documents)), torch.tensor(documents)), -1),
    )

"""A training step on one packed batch, forward and backward, without the optimizer: ours and real speculators 0.9.0.

With `--ranks N`, whole optimizer steps instead: one rank of one thread against N of them, under ZeRO-0 and ZeRO-3.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from batches import AUX_LAYERS, packed_batch, row_plan, scored_rows
from measure import BENCH, Local, Remote, Unavailable, gemm_flops, gemms, require_memory
from presets import SMOKE, Case
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3_fast import ops
from eagle3_fast.model.config import parse_draft_config
from eagle3_fast.model.draft import Draft
from eagle3_fast.model.ttt import Objective, run_ttt
from eagle3_fast.ops._dispatch import resolve
from eagle3_fast.ops._heads import held_bytes
from eagle3_fast.records import PackedBatch
from eagle3_fast.testing.budget import assert_within_budget

AXES = ("vocab", "ttt_steps", "supervised", "rows", "document")
PEER = Path(os.environ.get("EAGLE3_FAST_PEER", BENCH.parent / ".venv-peer")) / "bin" / "python"
"""The environment of speculators, made by `make bench-peer-venv`."""
PEER_TOLERANCE = 1e-4
"""Of the norm of all gradients, in float32: what the golden cases of the released package agree to."""


def make(provider: str, case: Case, dtype: torch.dtype, device: str) -> Local:
    if provider == "gemm":
        return Local(gemms(gemm_shapes(case), dtype, device), device)
    ops.select(provider)
    if provider == "auto" and not any(resolve(op, device, dtype) == "fused" for op in ("linear_divergence", "ttt_attention")):
        raise Unavailable("no fused op here: it would be the reference once more")
    error = check(provider, dtype, device)
    require_memory(4 * (case.model.verifier_vocab + 2 * case.vocab) * case.model.hidden, device)
    draft = _shared_draft(case.preset, case.vocab, device)
    heads = (draft.lm_head.weight, draft.verifier_lm_head.weight) if provider == "auto" else ()
    return Local(step(provider, draft, packed_batch(case, dtype, device), case, dtype), device, error, partial(held_bytes, *heads))


def step(impl: str, draft: Draft, batch: PackedBatch, case: Case, dtype: torch.dtype) -> Callable[[], list[Tensor]]:
    """Loss and gradients under autocast, as `train.engine.LocalEngine` runs them: float32 masters, frozen heads in `dtype`."""
    device, objective = batch.input_ids.device.type, Objective(ttt_steps=case.ttt_steps)
    for frozen in (draft.embed_tokens, draft.lm_head, draft.verifier_lm_head):
        frozen.to(dtype)
    parameters = [value for value in draft.parameters() if value.requires_grad]
    mixed = dtype not in (torch.float32, torch.float64)

    def call() -> list[Tensor]:
        ops.select(impl)
        with torch.autocast(device, dtype=dtype) if mixed else nullcontext():
            loss = run_ttt(draft, batch, objective).loss
        return [loss.detach(), *torch.autograd.grad(loss, parameters)]

    return call


def check(impl: str, dtype: torch.dtype, device: str) -> float:
    """Relative error of all gradients against float64 on the smoke case; fails where loss or gradients are beyond their budget."""
    batch = packed_batch(SMOKE, dtype, device)
    exact, eager, own = (
        _loss_and_gradients(step(name, new_draft(SMOKE, device).to(to), _cast(batch, to), SMOKE, to))
        for name, to in (("reference", torch.float64), ("reference", dtype), (impl, dtype))
    )
    for values, what in zip(zip(own, exact, eager, strict=True), ("loss", "gradients"), strict=True):
        assert_within_budget(*values, what)
    return _relative(own[1], exact[1])


def draft_config(case: Case) -> dict[str, Any]:
    """`config.json` of a speculators 0.9 draft with its trainer's norms, full attention and a frozen head."""
    model = case.model
    layer = {
        "model_type": "llama",
        "vocab_size": model.verifier_vocab,
        "hidden_size": model.hidden,
        "intermediate_size": model.intermediate,
        "num_hidden_layers": 1,
        "num_attention_heads": model.heads[0],
        "num_key_value_heads": model.heads[1],
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": 65_536,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    proposal = {"proposal_type": "greedy", "speculative_tokens": case.ttt_steps}
    return {
        "speculators_model_type": "eagle3",
        "draft_vocab_size": case.vocab,
        "norm_before_residual": True,
        "norm_before_fc": True,
        "norm_output": True,
        "eagle_aux_hidden_state_layer_ids": AUX_LAYERS,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": None, "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": layer,
    }


def new_draft(case: Case, device: str) -> Draft:
    """Float32 masters as at the start of training; the draft's head is the verifier's, on the first `case.vocab` words."""
    draft = Draft(parse_draft_config(draft_config(case), str(case)))
    draft.initialise(seed=0)
    draft.to(device)
    draw = torch.Generator(device).manual_seed(0)
    draft.embed_tokens.weight.data.normal_(0.0, 1.0, generator=draw)
    draft.verifier_lm_head.weight.data.normal_(0.0, 3 * case.model.hidden**-0.5, generator=draw)
    draft.lm_head.weight.data.copy_(draft.verifier_lm_head.weight)
    if draft.config.reduced_vocab:
        draft.t2d[: case.vocab] = True
    return draft


@lru_cache(maxsize=1)
def _shared_draft(preset: str, vocab: int, device: str) -> Draft:
    """In one process all providers and cases of these sizes share a draft: a large one takes longer to make than to time."""
    return new_draft(Case(preset, vocab), device)


def _cast(batch: PackedBatch, dtype: torch.dtype) -> PackedBatch:
    states = {name: getattr(batch, name).to(dtype) for name in ("aux_hidden_states", "last_hidden_states")}
    return PackedBatch(**{**vars(batch), **states})


def _loss_and_gradients(call: Callable[[], list[Tensor]]) -> tuple[Tensor, Tensor]:
    loss, *gradients = call()
    return loss, torch.cat([gradient.flatten() for gradient in gradients])


def _relative(actual: Tensor, exact: Tensor) -> float:
    return float((actual.double() - exact).norm() / exact.norm())


def gemm_shapes(case: Case) -> list[tuple[int, int, int]]:
    """Projections, MLP and heads of the rows that each step computes; attention is left out.

    The half of the projections that reads embeddings is the same in every step, up to a shift: it is needed once.
    """
    model, active = case.model, row_plan(case).active
    width, keys = model.heads[0] * model.head_dim, 2 * model.heads[1] * model.head_dim
    aux = len(AUX_LAYERS) * model.hidden
    shapes = [(case.rows, aux, model.hidden), (aux, case.rows, model.hidden)]
    shapes += _trained(case.rows + case.ttt_steps, model.hidden, width + keys)
    for k, rows in enumerate(map(len, active)):
        shapes += _trained(case.rows if k == 0 else rows, model.hidden, keys) + _trained(rows, model.hidden, width)
        shapes += _trained(rows, width, model.hidden)
        shapes += _trained(rows, model.hidden, 2 * model.intermediate) + _trained(rows, model.intermediate, model.hidden)
    needed, target_row = scored_rows(case)
    for part in target_row.split(1024):
        shapes += [(len(part), model.hidden, case.vocab), (len(part), case.vocab, model.hidden)]
    return shapes + [(len(part), model.hidden, case.vocab) for part in needed.split(1024)]


def _trained(rows: int, inputs: int, outputs: int) -> list[tuple[int, int, int]]:
    """Output, gradient of the input, gradient of the weight."""
    return [(rows, inputs, outputs), (rows, outputs, inputs), (inputs, rows, outputs)]


def write_case(folder: Path, case: Case) -> Path:
    """Draft and batch in the files of the golden cases, float32; the peer casts them."""
    folder.mkdir(parents=True)
    draft, batch = new_draft(case, "cpu"), packed_batch(case, torch.float32, "cpu")
    (folder / "config.json").write_text(json.dumps(draft_config(case)))
    save_file({name: value.contiguous() for name, value in draft.state_dict().items()}, folder / "draft.safetensors")
    rows = {name: value[None].contiguous() for name, value in vars(batch).items() if isinstance(value, Tensor)}
    rows["hidden_states"], rows["verifier_last_hidden_states"] = rows.pop("aux_hidden_states"), rows.pop("last_hidden_states")
    save_file(rows, folder / "batch.safetensors")
    return folder


def start_peer(case: Case, folder: Path, setting: Any) -> Remote:
    """Real speculators on the same draft and batch, checked in float32 whatever it is timed in: it rounds logits to bfloat16."""
    if not PEER.exists():
        raise Unavailable("no environment with speculators (make bench-peer-venv)")
    # Targets, then per step logits, their softmax and its logarithm, and as much again in the backward pass.
    require_memory(4 * case.rows * case.vocab * (1 + 3 * case.ttt_steps), setting.device)
    call = {"device": setting.device, "dtype": setting.dtype, "ttt_steps": case.ttt_steps}
    small = {"folder": str(write_case(folder / "small", SMOKE)), "gradients": str(folder / "gradients.safetensors")}
    spec = {**call, "folder": str(write_case(folder / "case", case)), "check": {**call, **small, "ttt_steps": SMOKE.ttt_steps}}
    (folder / "peer.json").write_text(json.dumps(spec))
    peer = Remote([str(PEER), str(BENCH / "peer_speculators.py"), str(folder / "peer.json")], setting.threads)
    peer.error = _peer_error(load_file(folder / "gradients.safetensors"), load_file(folder / "gradients-float32.safetensors"))
    return peer


def _peer_error(timed: dict[str, Tensor], single: dict[str, Tensor]) -> float:
    """Error of the gradients in the dtype that is timed; those in float32 must be those of the same computation as ours."""
    draft = new_draft(SMOKE, "cpu").double()
    names = [name for name, value in draft.named_parameters() if value.requires_grad]
    batch = _cast(packed_batch(SMOKE, torch.float32, "cpu"), torch.float64)
    _, exact = _loss_and_gradients(step("reference", draft, batch, SMOKE, torch.float64))
    found, in_single = (torch.cat([values[name].flatten() for name in names]) for values in (timed, single))
    assert _relative(in_single, exact) < PEER_TOLERANCE, "speculators computes something else than ours"
    return _relative(found, exact)


def test_train_step(compare, setting: Any, case: Case, tmp_path: Path) -> None:
    peer = {"speculators": partial(start_peer, case, tmp_path, setting)}
    compare("train_step", ["auto", "reference", "speculators", "gemm"], case, gemm_flops(gemm_shapes(case)), peer)


def test_ranks(compare, setting: Any, case: Case, request: pytest.FixtureRequest) -> None:
    """Every rank has a batch of the case: N ranks do N times the tokens of one."""
    ranks = request.config.getoption("ranks")
    if not ranks:
        pytest.skip("asked for with --ranks N")
    runs = {"1 rank": (1, 0), f"{ranks} ranks, ZeRO-0": (ranks, 0), f"{ranks} ranks, ZeRO-3": (ranks, 3)}
    script = [sys.executable, str(BENCH / "ranked_step.py"), json.dumps(asdict(case)), setting.dtype]
    makers = {name: partial(Remote, [*script, str(size), str(stage)], 1) for name, (size, stage) in runs.items()}
    compare("ranks", list(makers), case, makers=makers)

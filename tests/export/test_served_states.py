"""Layer ids and overfitting: the two ends of the chain that an export can break although every file is right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from eagle3_fast.export.speculators import export
from eagle3_fast.extract.verifier import Verifier
from eagle3_fast.extract.weights import verifier_weights
from eagle3_fast.model.draft import Draft, save_draft
from eagle3_fast.model.ttt import Objective, run_ttt
from eagle3_fast.records import HiddenStates
from eagle3_fast.train.packing import pack
from tests.export.drafts import draft_config, map_vocabulary, run_config
from tests.export.vllm_rules import ServedDraft
from tests.verifiers import toy_llama

LENGTH, PROMPT, DRAFTS = 64, 4, 3


def captured_by_engine(verifier: Verifier, tokens: Tensor, ids: list[int]) -> Tensor:
    """vLLM's rule: id j is the residual stream that enters layer j, or leaves the last layer where j = n. [T, len(ids) * G]."""
    entering: dict[int, Tensor] = {}
    layers = verifier.model.model.layers
    handles = [
        layer.register_forward_pre_hook(
            lambda _, args, kwargs, j=j: entering.update({j: (args or tuple(kwargs.values()))[0][0]}), with_kwargs=True
        )
        for j, layer in enumerate(layers)
    ]
    handles.append(layers[-1].register_forward_hook(lambda _, args, out: entering.update({len(layers): out[0]})))
    with torch.no_grad():
        verifier.model(input_ids=tokens[None])
    for handle in handles:
        handle.remove()
    return torch.cat([entering[j] for j in ids], -1)


@pytest.mark.parametrize("ids", [[1, 3], [2, 4], [0, 6]])
def test_engine_captures_the_states_that_training_used(ids: list[int], tmp_path: Path) -> None:
    verifier = Verifier(toy_llama(tmp_path), ids, torch.float32)
    tokens = torch.arange(3, 40)
    trained = verifier.hidden_states([tokens])[0][:, :-1].flatten(1)
    torch.testing.assert_close(captured_by_engine(verifier, tokens, ids), trained, rtol=0, atol=1e-6)


def greedy(verifier: Verifier, start: Tensor, length: int) -> Tensor:
    tokens = start
    while len(tokens) < length:
        tokens = torch.cat((tokens, verifier.logits(tokens)[-1:].argmax(-1)))
    return tokens


def overfitted(path: Path, tokens: Tensor, states: Tensor) -> Draft:
    """A draft trained on one sample until it knows it by heart."""
    ids = torch.unique(torch.cat((tokens, torch.tensor([9, 33, 60]))))
    draft = Draft(draft_config(draft_vocab_size=len(ids)))
    draft.initialise(0)
    map_vocabulary(draft, ids)
    weights = verifier_weights(path)
    with torch.no_grad():
        draft.embed_tokens.weight.copy_(weights.embed)
        draft.lm_head.weight.copy_(weights.head[ids])
        draft.verifier_lm_head.weight.copy_(weights.head[ids])
        draft.verifier_norm.weight.copy_(weights.norm)
    batch = pack([(HiddenStates(tokens, states), torch.ones(len(tokens)))], len(tokens) - 1, 3, 32, torch.float32)
    optimizer = torch.optim.AdamW([p for p in draft.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0)
    for _ in range(150):
        optimizer.zero_grad()
        run_ttt(draft, batch, Objective(ttt_steps=DRAFTS)).loss.backward()
        optimizer.step()
    return draft


def test_one_sample_learnt_by_heart_is_accepted_from_the_files_alone(tmp_path: Path) -> None:
    """Wrong final norm, mask, positions, mapping or any export mismatch would show as few accepted drafts."""
    path = toy_llama(tmp_path / "verifier", initializer_range=0.4)
    verifier = Verifier(path, [1, 2, 4], torch.float32)
    tokens = greedy(verifier, torch.tensor([1, 11, 23, 17]), LENGTH)
    states = verifier.hidden_states([tokens])[0]
    save_draft(overfitted(path, tokens, states), tmp_path / "checkpoint", torch.float32)
    folder = export(run_config(path, tmp_path / "out"), tmp_path / "checkpoint")
    assert load_file(folder / "model.safetensors")["fc.weight"].dtype == torch.bfloat16

    served = ServedDraft(folder, 64)
    aux = states[:, :-1].flatten(1)
    accepted = []
    for known in range(PROMPT, LENGTH - DRAFTS):  # the verifier has just chosen tokens[known]
        drafted = served.draft(tokens[: known + 1], aux[:known], DRAFTS)
        right = [a == b for a, b in zip(drafted, tokens[known + 1 :].tolist(), strict=False)]
        accepted.append(right.index(False) if False in right else DRAFTS)
    assert len(torch.unique(tokens)) >= 8, "the sample repeats itself and proves little"
    assert sum(accepted) / len(accepted) >= 2.8

"""Captured states against a plain forward pass of transformers."""

from __future__ import annotations

import pytest
import torch

from eagle3_fast.errors import InputError
from eagle3_fast.extract.verifier import Verifier, checked_layer_ids, default_layer_ids
from eagle3_fast.extract.weights import verifier_weights
from tests.extract.test_shape import TOYS
from tests.verifiers import toy_gemma3, toy_glm5, toy_llama, toy_multimodal, toy_qwen3


def tokens(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 60, (length,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("toy", TOYS)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_states_are_those_of_a_plain_forward(toy, attention, tmp_path):
    verifier = Verifier(toy(tmp_path), [0, 1, 5], attn_implementation=attention)
    ids = tokens(23)
    (states,) = verifier.hidden_states([ids])
    plain = verifier.model(ids[None], output_hidden_states=True)
    assert states.shape == (23, 4, 32) and states.dtype == torch.float32
    for axis, layer in enumerate([0, 1, 5]):
        torch.testing.assert_close(states[:, axis], plain.hidden_states[layer][0], rtol=0, atol=1e-5)
    weights = verifier_weights(tmp_path)
    torch.testing.assert_close(weights.logits(states[:, -1]), plain.logits[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(verifier.logits(ids), plain.logits[0].float(), rtol=0, atol=1e-5)
    torch.testing.assert_close(weights.embed[ids] * weights.shape.embedding_scale, states[:, 0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("toy", [toy_llama, toy_gemma3, toy_glm5, toy_multimodal])
def test_rows_of_a_batch_belong_to_their_request(toy, tmp_path):
    """Two prompts that share eight tokens, in either order and again, against one at a time."""
    verifier = Verifier(toy(tmp_path), [1, 3])
    shared = tokens(8)
    prompts = [torch.cat([shared, tokens(1, 1)]), torch.cat([shared, tokens(6, 2)])]
    alone = [verifier.hidden_states([prompt])[0] for prompt in prompts]
    for order in ([0, 1], [1, 0], [0, 1]):
        together = verifier.hidden_states([prompts[i] for i in order])
        for i, states in zip(order, together, strict=True):
            assert len(states) == len(prompts[i])
            torch.testing.assert_close(states, alone[i], rtol=0, atol=1e-4)


def test_hooks_are_gone_after_a_pass(tmp_path):
    verifier = Verifier(toy_llama(tmp_path), [0, 2])
    verifier.hidden_states([tokens(4)])
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in verifier.model.modules())


@pytest.mark.parametrize("toy", [toy_llama, toy_gemma3, toy_glm5, toy_qwen3])
def test_cached_passes_with_crops_equal_one_pass(toy, tmp_path):
    """The pattern of speculative decoding: several tokens at once, some taken back; beyond Gemma's window of 8 too."""
    verifier = Verifier(toy(tmp_path), [1, 3])
    ids, wrong = tokens(30), tokens(5, 9)[None]
    cache, logits, states = verifier.new_cache(), [], []
    for start, end in [(0, 11), (11, 15), (15, 16), (16, 30)]:
        step_logits, step_states = verifier.forward_cached(ids[None, start:end], cache)
        logits.append(step_logits)
        states.append(step_states)
        verifier.crop(cache, end)  # nothing to take back
        verifier.forward_cached(wrong, cache)
        verifier.crop(cache, end)
        assert cache.get_seq_length() == end
    torch.testing.assert_close(torch.cat(logits), verifier.logits(ids), rtol=0, atol=1e-4)
    torch.testing.assert_close(torch.cat(states), verifier.hidden_states([ids])[0], rtol=0, atol=1e-4)
    assert logits[0].dtype == torch.float32


def test_verifiers_that_cannot_take_tokens_back_are_refused(tmp_path):
    verifier = Verifier(toy_llama(tmp_path), [1])
    verifier.config.layer_types = ["linear_attention"] * 6
    with pytest.raises(InputError, match="recurrent layers"):
        verifier.new_cache()


def test_dtype_is_the_one_asked_for_or_the_stored_one(tmp_path):
    toy_llama(tmp_path)
    assert Verifier(tmp_path, [1]).hidden_states([tokens(3)])[0].dtype == torch.float32
    assert Verifier(tmp_path, [1], dtype=torch.bfloat16).hidden_states([tokens(3)])[0].dtype == torch.bfloat16


@pytest.mark.parametrize("layers", range(1, 9))
def test_default_layers_are_distinct_or_refused(layers):
    try:
        ids = default_layer_ids(layers)
    except InputError as error:
        assert layers < 7 and "target_layer_ids" in str(error)
        return
    assert len(set(ids)) == 3 and min(ids) >= 0 and max(ids) <= layers


def test_default_layers():
    assert default_layer_ids(32) == [2, 16, 29] and default_layer_ids(30) == [2, 15, 27]


def test_layer_ids_are_sorted_and_checked():
    assert checked_layer_ids([5, 0, 3], 6) == [0, 3, 5]
    for wrong in ([], [1, 1], [-1], [7]):
        with pytest.raises(InputError, match="distinct and within 0..6"):
            checked_layer_ids(wrong, 6)

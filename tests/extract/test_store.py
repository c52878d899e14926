"""Sample files: what is written is read, and every kind of damage is named."""

from __future__ import annotations

import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3_fast.extract.store import SampleError, is_whole, read_last_states, read_sample, sample_path, write_sample
from eagle3_fast.records import HiddenStates

IDS = torch.arange(10)


def states(tokens: int = 10, layers: int = 4, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(tokens, layers, 8, generator=torch.Generator().manual_seed(0)).to(dtype)


def put(folder, *, ids=IDS, hidden=None, row: int = 3, **extra) -> None:
    hidden = states() if hidden is None else hidden
    save_file({"token_ids": ids, "hidden_states": hidden, **extra}, sample_path(folder, row))


def refused(folder, message: str, n_aux: int = 3, row: int = 3) -> None:
    with pytest.raises(SampleError, match=message) as error:
        read_sample(folder, row, IDS, n_aux)
    assert f"hs_{row}.safetensors" in str(error.value) and error.value.sample.endswith(f"hs_{row}.safetensors")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_round_trip_in_speculators_layout(dtype, tmp_path):
    write_sample(tmp_path, 3, HiddenStates(IDS, states(dtype=dtype)))
    raw = load_file(tmp_path / "hs_3.safetensors")
    assert {name: tensor.dtype for name, tensor in raw.items()} == {"hidden_states": dtype, "token_ids": torch.int64}
    sample = read_sample(tmp_path, 3, IDS, 3)
    assert torch.equal(sample.states, states(dtype=dtype)) and torch.equal(sample.token_ids, IDS)
    assert [path.name for path in tmp_path.iterdir()] == ["hs_3.safetensors"]


def test_fewer_states_than_ids(tmp_path):
    put(tmp_path, hidden=states(6))
    refused(tmp_path, "has 6 rows of hidden states for 10 token ids")
    with pytest.raises(SampleError, match="6 rows"):
        write_sample(tmp_path, 4, HiddenStates(IDS, states(6)))
    assert not sample_path(tmp_path, 4).exists()


def test_one_other_token(tmp_path):
    other = IDS.clone()
    other[7] = 99
    put(tmp_path, ids=other)
    refused(tmp_path, "token 7 is 99, the dataset has 7")


def test_other_length(tmp_path):
    put(tmp_path, ids=torch.arange(11), hidden=states(11))
    refused(tmp_path, "is of 11 tokens, the dataset's row has 10")


def test_layer_count(tmp_path):
    put(tmp_path)
    refused(tmp_path, "holds 4 layers, 2 aux layers and the last one make 3", n_aux=2)
    put(tmp_path, hidden=states(layers=3))
    refused(tmp_path, "holds 3 layers, 3 aux layers and the last one make 4", n_aux=3)
    assert read_sample(tmp_path, 3, IDS, 2).states.shape == (10, 3, 8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("value", [7e4, float("nan"), float("-inf")])
def test_values_that_are_not_finite(dtype, value, tmp_path):
    """7e4 overflows float16 and is an ordinary number in bfloat16."""
    hidden = states(dtype=torch.float32)
    hidden[5, 1, 2] = value
    hidden = hidden.to(dtype)
    put(tmp_path, hidden=hidden)
    if dtype == torch.bfloat16 and value == 7e4:
        assert read_sample(tmp_path, 3, IDS, 3).states[5, 1, 2].isfinite()
        return
    refused(tmp_path, "states of token 5 are not finite")
    with pytest.raises(SampleError, match="token 5"):
        write_sample(tmp_path, 4, HiddenStates(IDS, hidden))
    assert not sample_path(tmp_path, 4).exists()


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_truncated_file(kept, tmp_path):
    put(tmp_path)
    path = sample_path(tmp_path, 3)
    path.write_bytes(path.read_bytes()[:kept])
    refused(tmp_path, "not a whole sample file")
    assert not is_whole(tmp_path, 3, IDS, 3)


def test_missing_file_and_missing_tensor(tmp_path):
    refused(tmp_path, "no such file; run extract")
    save_file({"hidden_states": states()}, sample_path(tmp_path, 3))
    refused(tmp_path, "holds no token_ids")


def fp8_of(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scales as speculators' fp8 backend makes them: one scale for all layers of a token, amax / 448."""
    scales = (hidden.float().abs().amax((1, 2), keepdim=True) / 448).clamp_min(1e-12)
    return (hidden.float() / scales).to(torch.float8_e4m3fn), scales


def test_fp8_files_of_speculators(tmp_path):
    hidden = states() * torch.tensor([1e-3, 1, 200.0] + [1] * 7, dtype=torch.bfloat16)[:, None, None]
    values, scales = fp8_of(hidden)
    put(tmp_path, hidden=values, hidden_states_scales=scales)
    sample = read_sample(tmp_path, 3, IDS, 3)
    assert sample.states.dtype == torch.bfloat16
    assert torch.equal(sample.states, values.bfloat16() * scales.bfloat16())
    largest = hidden.float().abs().amax((1, 2), keepdim=True)
    assert ((sample.states.float() - hidden.float()).abs() <= hidden.float().abs() / 16 + largest / 128).all()
    assert torch.equal(read_last_states(tmp_path, 3, 4), sample.states[:4, -1])


@pytest.mark.parametrize(
    ("scales", "message"),
    [
        (None, "are float8 without hidden_states_scales"),
        (torch.ones(10), "hidden_states_scales is float32 [10], must be float32 [10, 1, 1]"),
        (torch.ones(1, 1, 1), "hidden_states_scales is float32 [1, 1, 1], must"),
        (torch.ones(10, 4, 1), "hidden_states_scales is float32 [10, 4, 1], must"),
        (torch.ones(10, 1, 1).bfloat16(), "hidden_states_scales is bfloat16 [10, 1, 1], must"),
        (torch.ones(10, 1, 1).index_fill(0, torch.tensor(4), torch.inf), "hidden_states_scales of token 4 is inf"),
        (torch.ones(10, 1, 1).index_fill(0, torch.tensor(4), torch.nan), "hidden_states_scales of token 4 is nan"),
        (torch.ones(10, 1, 1).index_fill(0, torch.tensor(4), 0.0), "hidden_states_scales of token 4 is 0.0"),
    ],
)
def test_fp8_scales_that_cannot_be(tmp_path, scales, message):
    put(tmp_path, hidden=states().to(torch.float8_e4m3fn), **({} if scales is None else {"hidden_states_scales": scales}))
    refused(tmp_path, re.escape(message))
    with pytest.raises(SampleError, match=re.escape(message)):
        read_last_states(tmp_path, 3, 8)


def test_an_fp8_value_that_is_not_a_number(tmp_path):
    values, scales = fp8_of(states())
    values.view(torch.uint8)[6, 1, 2] = 0x7F
    put(tmp_path, hidden=values, hidden_states_scales=scales)
    refused(tmp_path, "states of token 6 are not finite")


def test_the_last_states_of_a_few_tokens(tmp_path):
    put(tmp_path)
    assert torch.equal(read_last_states(tmp_path, 3, 4), states()[:4, -1])
    assert torch.equal(read_last_states(tmp_path, 3, 99), states()[:, -1])
    put(tmp_path, hidden=states(layers=0), row=4)
    for row, message in ((4, "must be \\[tokens, layers, hidden size"), (5, "no such file")):
        with pytest.raises(SampleError, match=message):
            read_last_states(tmp_path, row, 4)


def test_is_whole(tmp_path):
    put(tmp_path)
    assert is_whole(tmp_path, 3, IDS, 3)
    assert not is_whole(tmp_path, 3, IDS + 1, 3) and not is_whole(tmp_path, 3, IDS, 2) and not is_whole(tmp_path, 4, IDS, 3)

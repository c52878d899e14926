"""The client of a hidden-state server: what it takes, what it asks for again, what it refuses, and that no file is left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from openai_server import serving
from vllm_stub import VllmStub

from eagle3_fast.config import RunConfig
from eagle3_fast.endpoint import EndpointError
from eagle3_fast.errors import InputError
from eagle3_fast.extract import vllm_states
from eagle3_fast.extract.sources import OnlineStates
from eagle3_fast.extract.store import SampleError
from eagle3_fast.extract.verifier import Verifier
from eagle3_fast.extract.vllm_states import VllmStates

LAYERS = [1, 3, 4]
ROWS = [[5, 6, 7, 8, 9], [10, 11], [12, 13, 14, 15, 16, 17, 18, 19, 20]]
Client = Callable[..., VllmStates]


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_states, "BACKOFF", 0.01)


@pytest.fixture
def stub(toy: Path, tmp_path: Path) -> VllmStub:
    return VllmStub(toy, LAYERS, tmp_path / "exchange")


@pytest.fixture
def client(stub: VllmStub, toy: Path) -> Iterator[Client]:
    dataset = Dataset.from_dict({"input_ids": ROWS, "loss_mask": [[1] * len(row) for row in ROWS], "seq_len": list(map(len, ROWS))})

    def connected(url: str, layer_ids: list[int] = LAYERS, dtype: str = "float32", **generation: Any) -> VllmStates:
        train = {
            "verifier": {"verifier_name_or_path": str(toy)},
            "data": {"hidden_states_dtype": dtype},
            "generation": {"vllm_endpoint": url, **generation},
        }
        return VllmStates(RunConfig.model_validate({"train": train}), dataset, layer_ids)

    with serving(stub) as url:
        yield lambda **options: connected(options.pop("url", url), **options)


def left(stub: VllmStub) -> list[Path]:
    return list(stub.folder.iterdir())


def expected(toy: Path, row: int) -> torch.Tensor:
    return Verifier(toy, LAYERS, torch.float32).hidden_states([torch.tensor(ROWS[row])])[0]


def test_states_are_the_verifiers_own_and_nothing_is_left(client: Client, stub: VllmStub, toy: Path) -> None:
    source = client()
    for row in (2, 0, 1):
        sample = source.load(row)
        assert sample.token_ids.tolist() == ROWS[row]
        assert torch.equal(sample.states, expected(toy, row))
    assert stub.prompts == [ROWS[2], ROWS[0], ROWS[1]]
    assert left(stub) == []


def test_many_at_once(client: Client, stub: VllmStub, toy: Path) -> None:
    source = client()
    with ThreadPoolExecutor(8) as pool:
        samples = list(pool.map(source.load, [0, 1, 2] * 8))
    for number, sample in enumerate(samples):
        assert torch.equal(sample.states, expected(toy, number % 3))
    assert left(stub) == []


def test_states_are_given_in_the_runs_dtype(client: Client, toy: Path) -> None:
    assert torch.equal(client(dtype="bfloat16").load(0).states, expected(toy, 0).bfloat16())


def test_a_slow_writer_is_waited_for(client: Client, stub: VllmStub, toy: Path) -> None:
    stub.held = 0.3
    assert torch.equal(client().load(0).states, expected(toy, 0))
    assert len(stub.prompts) == 1


def test_a_lock_that_is_never_let_go_is_bounded(client: Client, stub: VllmStub) -> None:
    stub.held = 1.5
    with pytest.raises(SampleError, match=r"row 0: .*cmpl-1.safetensors.lock is still held after 0.2 s, at try 2 of 2"):
        client(request_timeout=0.2, generation_validation_retries=1).load(0)


def test_a_file_without_a_lock_is_whole(client: Client, stub: VllmStub, toy: Path) -> None:
    stub.unlocked = True
    assert torch.equal(client().load(0).states, expected(toy, 0))


BROKEN: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "too few rows": (lambda t: t | {"hidden_states": t["hidden_states"][2:]}, r"holds states \[3, 4, 32\] for 5 tokens"),
    "not finite": (lambda t: t | {"hidden_states": t["hidden_states"] * torch.nan}, "not finite in torch.float32"),
    "no file": (lambda t: None, r"cmpl-\d.safetensors, which is not there"),
    "no states": (lambda t: {"token_ids": t["token_ids"]}, "holds no hidden_states"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_what_is_broken_is_asked_for_again(client: Client, stub: VllmStub, toy: Path, fault: str) -> None:
    damage, message = BROKEN[fault]
    stub.damage = lambda number, tensors: damage(tensors) if number < 2 else tensors
    assert torch.equal(client().load(0).states, expected(toy, 0))
    assert len(stub.prompts) == 3
    stub.damage = lambda number, tensors: damage(tensors)
    with pytest.raises(SampleError, match=f"row 0: .*{message}.*at try 3 of 3"):
        client().load(0)
    assert len(stub.prompts) == 6
    assert left(stub) == []


@pytest.mark.parametrize("where", ["answer and file", "file"])
def test_other_tokens_are_named_by_position_and_not_asked_for_again(client: Client, stub: VllmStub, where: str) -> None:
    other = [5, 6, 7, 63, 9]
    if where == "file":
        stub.damage = lambda number, tensors: tensors | {"token_ids": torch.tensor(other)}
    else:
        stub.read_as = lambda ids: other
    with pytest.raises(SampleError, match=r"row 0: .*token 3 as 63, the dataset has 8"):
        client().load(0)
    stub.read_as = lambda ids: ids[:-1]
    with pytest.raises(SampleError, match="row 0: the server read 4 tokens, the dataset's row has 5"):
        client().load(0)
    assert len(stub.prompts) == 2
    assert left(stub) == []


def test_a_server_of_other_layers_or_another_width_is_refused(client: Client, stub: VllmStub) -> None:
    with pytest.raises(
        EndpointError, match=r"gives 4 layers 32 wide, the run needs layers \[1, 3, 4, 5, 6\] 32 wide; start it with"
    ):
        client(layer_ids=[1, 3, 4, 5]).load(0)
    stub.damage = lambda number, tensors: tensors | {"hidden_states": tensors["hidden_states"][..., :8].contiguous()}
    with pytest.raises(EndpointError, match="gives 4 layers 8 wide"):
        client().load(0)
    assert len(stub.prompts) == 2
    assert left(stub) == []


def test_the_last_layer_may_be_an_aux_layer_too(client: Client, stub: VllmStub, toy: Path) -> None:
    """vLLM drops the second mention of a layer."""
    stub.damage = lambda number, tensors: tensors | {"hidden_states": tensors["hidden_states"][:, [0, 1, 3]].contiguous()}
    assert torch.equal(client(layer_ids=[1, 3, 6]).load(0).states, expected(toy, 0)[:, [0, 1, 3, 3]])


def test_a_plain_vllm_server_is_named_as_such(client: Client, stub: VllmStub) -> None:
    stub.refuse = lambda number, payload: (200, {"choices": [{"prompt_token_ids": payload["prompt"]}], "kv_transfer_params": None})
    with pytest.raises(EndpointError, match=r"names no hidden states \(kv_transfer_params: .*serve-verifier"):
        client().load(0)


def test_another_model_is_refused(client: Client, stub: VllmStub) -> None:
    stub.name = "other"
    with pytest.raises(EndpointError, match="serves other, not"):
        client().load(0)


def test_a_folder_that_this_machine_does_not_see_is_named(client: Client, stub: VllmStub) -> None:
    answer = {"choices": [{"prompt_token_ids": ROWS[0]}], "kv_transfer_params": {"hidden_states_path": "/elsewhere/x.safetensors"}}
    stub.refuse = lambda number, payload: (200, answer)
    with pytest.raises(EndpointError, match="leaves states in /elsewhere, which this machine does not see"):
        client().load(0)


def test_errors_of_the_server_are_tried_again_and_then_end_everything(client: Client, stub: VllmStub, toy: Path) -> None:
    stub.refuse = lambda number, payload: (500, "engine") if number < 3 else False
    assert torch.equal(client().load(0).states, expected(toy, 0))
    stub.refuse = lambda number, payload: (500, "engine")
    source = client(max_retries=1)
    with pytest.raises(EndpointError, match=r"answered 500 in 2 tries \(engine\)"):
        source.load(0)
    asked = len(stub.prompts)
    with pytest.raises(EndpointError, match="answered 500 in 2 tries"):
        source.load(1)
    assert len(stub.prompts) == asked  # nothing more is asked of it


def test_a_row_that_the_server_refuses_is_that_rows_fault(client: Client, stub: VllmStub, toy: Path) -> None:
    stub.refuse = lambda number, payload: (400, {"error": {"message": "too long"}}) if len(payload["prompt"]) == 2 else False
    source = client()
    with pytest.raises(SampleError, match=r"row 1: .*refused with 400 \(too long\)"):
        source.load(1)
    assert torch.equal(source.load(0).states, expected(toy, 0))
    assert len(stub.prompts) == 2


def test_so_many_failures_in_a_row_are_no_fault_of_the_rows(client: Client, stub: VllmStub) -> None:
    source = client(max_consecutive_generation_failures=3)
    stub.read_as = lambda ids: ids[1:]
    for _ in range(2):
        with pytest.raises(SampleError):
            source.load(0)
    stub.read_as = lambda ids: ids
    source.load(1)  # the count begins anew
    stub.read_as = lambda ids: ids[1:]
    for _ in range(2):
        with pytest.raises(SampleError):
            source.load(0)
    with pytest.raises(EndpointError, match="3 samples in a row could not be used; the last: row 2: the server read 8 tokens"):
        source.load(2)


def test_a_server_that_comes_back_is_not_missed(client: Client, stub: VllmStub, toy: Path) -> None:
    with serving(stub) as url:
        source = client(url=url, max_retries=10)
        source.load(0)
    port = int(url.rpartition(":")[2])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(source.load, 2)
        with serving(stub, port):
            assert torch.equal(waiting.result().states, expected(toy, 2))


def test_a_server_that_does_not_come_back_is_one_line(client: Client, stub: VllmStub) -> None:
    with serving(stub) as url:
        source = client(url=url, max_retries=2)
    with pytest.raises(EndpointError, match=r"no answer in 3 tries \(.*refused.*is the server running") as caught:
        source.load(0)
    assert "\n" not in str(caught.value)


def test_no_endpoint_is_one_line(client: Client) -> None:
    with pytest.raises(InputError, match=r"train.generation.vllm_endpoint is not set.*http://127.0.0.1:8000"):
        client(url="")


def test_files_of_speculators_fp8_connector_are_read(client: Client, stub: VllmStub, toy: Path) -> None:
    def quantised(number: int, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        scale = tensors["hidden_states"].abs().amax((1, 2), keepdim=True) / 448
        return tensors | {
            "hidden_states": (tensors["hidden_states"] / scale).to(torch.float8_e4m3fn),
            "hidden_states_scales": scale,
        }

    stub.damage = quantised
    torch.testing.assert_close(client().load(0).states, expected(toy, 0), rtol=0.07, atol=0.02)


def test_the_same_states_as_online(client: Client, toy: Path) -> None:
    source = client()
    online = OnlineStates(Verifier(toy, LAYERS, torch.float32), source.dataset)
    for row in range(3):
        torch.testing.assert_close(source.load(row).states, online.load(row).states, rtol=0, atol=1e-4)

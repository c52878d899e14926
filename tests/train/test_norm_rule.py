"""States on the wrong side of the verifier's final norm are named before step 1, and right ones never are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from train.runs import changed, prepared_run
from verifiers import toy_gemma3, toy_granite, toy_llama, toy_llama_tied, toy_qwen3

from eagle3_fast.config import RunConfig
from eagle3_fast.errors import InputError
from eagle3_fast.extract.weights import verifier_weights
from eagle3_fast.model.config import parse_draft_config
from eagle3_fast.train import norm_rule
from eagle3_fast.train.loader import PackedRows
from eagle3_fast.train.norm_rule import check_norm_rule, normed_share
from eagle3_fast.train.start import objective, planned_config
from eagle3_fast.train.trainer import Trainer


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, toy: Path) -> RunConfig:
    return prepared_run(tmp_path_factory.mktemp("run"), toy)


def normed(states: torch.Tensor, folder: Path) -> torch.Tensor:
    """The last of states [T, n, G] after the verifier's final norm, rounded as Llama rounds in the states' dtype."""
    weights, last = verifier_weights(folder, names=("norm",)), states[:, -1].float()
    eps = weights.shape.rms_norm_eps
    unit = (last * torch.rsqrt(last.square().mean(-1, keepdim=True) + eps)).to(states.dtype)
    return torch.cat((states[:, :-1], (unit * weights.norm.to(states.dtype))[:, None]), dim=1)


def copied(run: RunConfig, folder: Path, change: Any = None, only: tuple[int, ...] | None = None) -> RunConfig:
    """The same run on a copy of its hidden states, those of the rows `only` (none: all) changed."""
    folder.mkdir()
    for path in run.hidden_states_path.glob("hs_*"):
        tensors = load_file(path)
        if change is not None and (only is None or int(path.stem.removeprefix("hs_")) in only):
            tensors["hidden_states"] = change(tensors["hidden_states"])
        save_file({name: value.contiguous() for name, value in tensors.items()}, folder / path.name)
    return changed(
        run, extract={"hidden_states_path": str(folder)}, **{"train.trainer": {"save_path": str(folder / "checkpoints")}}
    )


def after(run: RunConfig, folder: Path, **engine: Any) -> RunConfig:
    verifier = Path(run.train.verifier.verifier_name_or_path)
    return changed(copied(run, folder, lambda states: normed(states, verifier)), engine=engine)


@pytest.mark.parametrize("engine", [{}, {"verifier_norm": True}, {"compat": "0.3", "verifier_norm": True}])
def test_normed_states_are_not_normed_again(run: RunConfig, tmp_path: Path, engine: dict) -> None:
    with pytest.raises(
        InputError,
        match=r"hs_0.safetensors: its last states lie after the verifier's final norm \(over its gain, 100% of "
        "them have RMS 1.*set engine.verifier_norm to false",
    ) as caught:
        Trainer(after(run, tmp_path / "hs", **engine))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("engine", [{"verifier_norm": False}, {"compat": "0.3"}, {"data_format_version": 0}])
def test_normed_states_train_without_the_norm(run: RunConfig, tmp_path: Path, engine: dict) -> None:
    assert not Trainer(after(run, tmp_path / "hs", **engine)).objective.verifier_norm


@pytest.mark.parametrize(
    ("engine", "why"),
    [({"compat": "0.3"}, "engine.compat is 0.3"), ({"data_format_version": 0}, "engine.data_format_version is 0")],
)
def test_states_before_the_norm_need_it(run: RunConfig, tmp_path: Path, engine: dict, why: str) -> None:
    config = changed(run, engine=engine, **{"train.trainer": {"save_path": str(tmp_path)}})
    with pytest.raises(
        InputError, match=rf"before the verifier's final norm.*\(over its gain, 0% .*since {why}; set engine.verifier_norm to true"
    ):
        Trainer(config)
    assert Trainer(changed(config, engine={"verifier_norm": True})).objective.verifier_norm
    assert not Trainer(changed(config, engine={"verifier_norm": False})).objective.verifier_norm
    online = changed(config, engine={"verifier_norm": None})
    with pytest.raises(
        InputError, match="what this run computes lies before the verifier's final norm, and this run would not norm"
    ):
        Trainer(online, online=True)


def test_a_folder_of_both_kinds(run: RunConfig, tmp_path: Path) -> None:
    verifier = Path(run.train.verifier.verifier_name_or_path)
    config = copied(run, tmp_path / "hs", lambda states: normed(states, verifier), only=(3,))
    for engine in ({}, {"verifier_norm": False}):
        with pytest.raises(
            InputError, match="hs_3.safetensors: its last states lie after.*while .*hs_0.safetensors: its last states lie before"
        ):
            Trainer(changed(config, engine=engine))
    generated = changed(after(run, tmp_path / "after", verifier_norm=False), **{"train.generation": {"on_missing": "generate"}})
    with pytest.raises(InputError, match="lie after.*while what this run computes lies before"):
        Trainer(generated)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
@pytest.mark.parametrize("write", [toy_llama, toy_llama_tied, toy_qwen3, toy_gemma3, toy_granite], ids=lambda write: write.__name__)
def test_every_kind_of_gain_in_every_storage(tmp_path: Path, write: Any, dtype: torch.dtype) -> None:
    """States of the verifier itself, and the same after its own norm; (1 + w) gains among them."""
    from eagle3_fast.extract.shape import final_norm
    from eagle3_fast.extract.verifier import Verifier

    folder = write(tmp_path, hidden_size=512, num_attention_heads=4, head_dim=16, intermediate_size=64)
    verifier, gain = Verifier(folder, [1], torch.float32), verifier_weights(folder, names=("norm",)).norm
    states = verifier.hidden_states([torch.arange(8, 40)])[0][:, -1]
    with torch.no_grad():
        own = final_norm(verifier._decoder)(states)
    for value, share in ((states, 0.0), (own, 1.0)):
        scale = value.abs().amax(-1, keepdim=True) / 448 if dtype == torch.float8_e4m3fn else 1.0
        assert normed_share((value / scale).to(dtype).float() * scale, gain) == share


def test_states_that_happen_to_be_of_the_gains_size(toy: Path) -> None:
    """Before the norm, of sizes around 1 over the gain: as unlikely a verifier as there can be."""
    gain, draw = verifier_weights(toy, names=("norm",)).norm, torch.Generator().manual_seed(0)
    states = torch.randn(400, 32, generator=draw)
    states = states / states.square().mean(-1, keepdim=True).sqrt() * gain
    sizes = 0.8 + 0.45 * torch.rand(400, 1, generator=draw)
    assert normed_share(states, gain) == 1
    assert normed_share(states * sizes, gain) < 0.2


def test_it_reads_little_and_forgives_what_the_run_will_name(
    run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = copied(run, tmp_path / "hs")
    (tmp_path / "hs" / "hs_0.safetensors").unlink()
    (tmp_path / "hs" / "hs_3.safetensors").write_bytes(b"cut")
    rows = packed(config)
    asked: list[tuple[int, int]] = []
    read = rows.stored.last_states
    monkeypatch.setattr(rows.stored, "last_states", lambda row, tokens: asked.append((row, tokens)) or read(row, tokens))
    check_norm_rule(config, rows, applied=True)
    assert len(asked) == 8 and {tokens for _, tokens in asked} == {norm_rule.CHECKED_TOKENS}
    assert [row for row, _ in asked] == list(range(0, 24, 3))


def test_a_gain_of_zero_leaves_it_open(run: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    weights = verifier_weights(run.train.verifier.verifier_name_or_path, names=("norm",))
    gain = weights.norm.clone()
    gain[3] = 0
    monkeypatch.setattr(norm_rule, "verifier_weights", lambda *arguments, **options: replace(weights, norm=gain))
    check_norm_rule(run, packed(run), applied=False)


def packed(config: RunConfig) -> PackedRows:
    shape = verifier_weights(config.train.verifier.verifier_name_or_path, names=()).shape
    data = planned_config(changed(config, **{"train.draft": {"draft_vocab_size": None}}), shape, None).model_dump()
    return PackedRows(config, parse_draft_config(data, "test"), online=False)


def test_compat_and_format_decide_what_the_file_leaves_open(run: RunConfig) -> None:
    for compat, version, own, wanted in (
        ("0.9", 1, None, True),
        ("0.9", 0, None, False),
        ("0.3", 1, None, False),
        ("0.3", 0, None, False),
        ("0.3", 1, True, True),
        ("0.9", 0, True, True),
        ("0.9", 1, False, False),
    ):
        engine = {"compat": compat, "data_format_version": version, "verifier_norm": own}
        assert objective(changed(run, engine=engine)).verifier_norm == wanted

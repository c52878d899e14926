"""`plan`: its bytes against those that a training step really holds, against sums done by hand, and what it says where nothing fits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors import safe_open
from train.runs import prepared_run, run_config

from eagle3_fast import precision
from eagle3_fast.cli import main
from eagle3_fast.config import RunConfig
from eagle3_fast.errors import InputError
from eagle3_fast.files import write_json
from eagle3_fast.model.draft import Draft
from eagle3_fast.model.ttt import plan_rows, run_ttt
from eagle3_fast.ops._heads import held_bytes
from eagle3_fast.records import PackedBatch
from eagle3_fast.train import plan as planning
from eagle3_fast.train.footprint import Setting, Stage
from eagle3_fast.train.optim import build_optimizers
from eagle3_fast.train.plan import Estimate, parse_bytes, plan, recommendation, warn_if_too_big
from eagle3_fast.train.start import objective, trains_head

ROOT = Path(__file__).parents[2]
VERIFIERS = Path(__file__).parent / "verifier_configs"
VERIFIER: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 6000,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def sized_run(folder: Path, verifier: dict[str, Any] | None = None, **train: dict[str, Any]) -> RunConfig:
    """A run of which nothing exists but the verifier's config.json."""
    write_json(folder / "verifier" / "config.json", {**VERIFIER, **(verifier or {})})
    sections = {"verifier": {"verifier_name_or_path": str(folder / "verifier")}, "data": {}, "draft": {"draft_vocab_size": 4000}}
    sections["data"] = {"data_path": str(folder / "data"), **train.pop("data", {})}
    engine = train.pop("engine", {})
    return RunConfig.model_validate({"train": {**sections, **train}, "engine": engine})


# --- against what is really held ---------------------------------------------------------------------------------------

MEASURED: dict[str, dict[str, Any]] = {
    "float32, 4 steps": {
        "data": {"total_seq_len": 320, "hidden_states_dtype": "float32"},
        "loss": {"ttt_steps": 4},
        "engine": {"accumulation": 2},
    },
    "float32, 7 steps, recompute": {
        "verifier": {"hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 6, "num_key_value_heads": 2},
        "data": {"total_seq_len": 448, "hidden_states_dtype": "float32"},
        "draft": {"draft_vocab_size": 1000, "norm_before_fc": False, "fc_norm": True},
        "loss": {"ttt_steps": 7},
        "engine": {"accumulation": 2, "recompute": True},
    },
    "float32, 2 steps, 2 layers of Qwen3, AdamW": {
        "verifier": {"hidden_size": 384, "intermediate_size": 1024, "num_attention_heads": 6, "num_key_value_heads": 6},
        "data": {"total_seq_len": 576, "hidden_states_dtype": "float32"},
        "draft": {"draft_vocab_size": 1000, "draft_arch": "qwen3", "num_layers": 2, "norm_output": False},
        "loss": {"ttt_steps": 2},
        "optimizer": {"optimizer": "adamw"},
        "engine": {"accumulation": 2},
    },
    "bfloat16 under autocast, 3 steps": {
        "verifier": {"hidden_size": 256, "intermediate_size": 768, "num_attention_heads": 4, "num_key_value_heads": 2},
        "data": {"total_seq_len": 32, "hidden_states_dtype": "bfloat16"},
        "draft": {"draft_vocab_size": 1000},
        "loss": {"ttt_steps": 3},
        "optimizer": {"optimizer": "adamw"},
        "engine": {"accumulation": 2},
    },
}


def measure(folder: Path, case: dict[str, Any]) -> dict[str, int]:
    """Bytes as torch's allocator reports them: most held in the second packed batch of a window, and by the optimizers' states.

    Every allocation is counted, those inside ops too, so the figures repeat exactly.
    """
    config = sized_run(folder, **case)
    item = {"float32": 4, "bfloat16": 2}[config.train.data.hidden_states_dtype]
    precision.cpu_multiplies_bfloat16 = lambda: item == 2  # whatever this CPU has
    estimate = Estimate(config, item, online=False)
    draft, batch, target = _in_dtype(estimate, config), _supervised(estimate, config), objective(config)
    optimizers = build_optimizers(draft.named_parameters(), config.train.optimizer)

    def compute() -> None:
        rows = plan_rows(batch, target)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=item == 2):
            output = run_ttt(draft, batch, target, rows.counts, rows)
        output.loss.backward()

    def update() -> None:
        for optimizer in optimizers:
            optimizer.step()

    compute()
    activations, _ = _held_during(compute)
    _, states = _held_during(update)
    passing, _ = _held_during(update)
    setting = Setting("cpu", item, 1, 0, config.engine.recompute, config.engine.accumulation)
    found = estimate.footprint(setting)
    return {
        "activations": activations,
        "planned activations": found.moment.total,
        "packed heads": held_bytes(draft.lm_head.weight, draft.verifier_lm_head.weight),
        "planned packed heads": found.packed_heads,
        "optimizer": states,
        "planned optimizer": found.resting.optimizer,
        "update": passing,
        "planned update": found.update,
        "gradients": sum(x.grad.nbytes for x in draft.parameters() if x.grad is not None),
        "planned gradients": found.resting.gradients,
        "frozen and trained": sum(x.nbytes for x in (*draft.parameters(), *draft.buffers())),
        "planned frozen and trained": found.resting.frozen + found.resting.parameters,
    }


def _in_dtype(estimate: Estimate, config: RunConfig) -> Draft:
    """A draft with its frozen parts in the run's dtype, as `train.start` places them."""
    draft = Draft(estimate.draft, train_head=trains_head(config))
    draft.initialise(0)
    draft.recompute(config.engine.recompute)
    draft.t2d[: estimate.draft.draft_vocab_size] = True
    dtype = getattr(torch, config.train.data.hidden_states_dtype)
    for module in (draft.embed_tokens, draft.verifier_lm_head, draft.lm_head):
        if not module.weight.requires_grad:
            module.weight.data = module.weight.data.to(dtype)
    return draft


def _supervised(estimate: Estimate, config: RunConfig) -> PackedBatch:
    """One document that fills the batch, every row supervised: the worst case, which `plan` assumes."""
    rows, layer = config.train.data.total_seq_len, estimate.draft.transformer_layer_config
    dtype, draw = getattr(torch, config.train.data.hidden_states_dtype), torch.Generator().manual_seed(0)
    return PackedBatch(
        input_ids=torch.randint(layer.vocab_size, (rows,), generator=draw),
        aux_hidden_states=torch.randn(rows, estimate.draft.num_aux * layer.hidden_size, generator=draw).to(dtype),
        last_hidden_states=torch.randn(rows, layer.hidden_size, generator=draw).to(dtype),
        loss_mask=torch.ones(rows, dtype=torch.int64),
        position_ids=torch.arange(1, rows + 1),
        document_ids=torch.zeros(rows, dtype=torch.int64),
    )


def _held_during(call: Callable[[], None]) -> tuple[int, int]:
    """Bytes beyond those held before: at most, and at the end."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most, held


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, int]]:
    """Every case of MEASURED, in a process of its own: no tensor of another test is freed while it counts."""
    paths = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path_factory.mktemp("measured"))],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": paths},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("what", ["activations", "packed heads", "optimizer", "update", "gradients", "frozen and trained"])
@pytest.mark.parametrize("case", MEASURED)
def test_a_step_holds_what_was_planned(measured: dict[str, dict[str, int]], case: str, what: str) -> None:
    found = measured[case]
    assert found[f"planned {what}"] == pytest.approx(found[what], rel=0.1, abs=100)  # the fused AdamW makes a few counts


@pytest.mark.parametrize(("compat", "columns"), [("0.9", 3 * 512 + 4), ("0.3", 512 + 2)])
def test_packed_heads_are_the_frozen_ones_of_a_cpu_that_multiplies_bfloat16(
    compat: str, columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verifier's head for its logits, the draft's, where it is frozen, for its own and for gradients."""
    engine = {"compat": compat} | ({"data_format_version": 0} if compat == "0.3" else {})
    estimate = Estimate(sized_run(tmp_path, engine=engine), 2, online=False)

    def planned(device: Literal["cpu", "cuda"], item: Literal[2, 4] = 2, stage: Stage = 0) -> int:
        return estimate.footprint(Setting(device, item, 1, stage, False, 1)).packed_heads

    monkeypatch.setattr("eagle3_fast.train.footprint.packs", lambda dtype: True)
    assert planned("cpu") == planned("cpu", stage=2) == 4000 * columns * 2
    assert planned("cuda") == planned("cpu", item=4) == planned("cpu", stage=3) == 0
    monkeypatch.setattr("eagle3_fast.train.footprint.packs", lambda dtype: False)
    assert planned("cpu") == 0


# --- by hand -----------------------------------------------------------------------------------------------------------


def glm5(folder: Path, **changes: Any) -> RunConfig:
    """GLM-5 with a draft vocabulary of 32,000 and no data."""
    return run_config(
        folder,
        VERIFIERS / "glm5",
        **{
            "train.draft": {"draft_vocab_size": 32000, "target_layer_ids": None},
            "train.data": {"total_seq_len": 8192, "hidden_states_dtype": "bfloat16"},
            **changes,
        },
    )


EMBEDDING, HEAD, NORM, MAPPING = 154880 * 6144 * 2, 32000 * 6144 * 2, 6144 * 4, 32000 * 8 + 154880
GLM5_FROZEN = EMBEDDING + 2 * HEAD + NORM + MAPPING
"""Embedding, verifier head rows and the draft's frozen copy of them in bfloat16, the verifier's norm in float32, d2t and t2d."""
GLM5_MATRICES = 6144 * 18432 + 2 * 16384 * 6144 + 2 * 2 * 2048 * 6144 + 6144 * 16384 + 3 * 6144 * 12288
"""fc; q, k and v, which read embedding and hidden state; o; gate, up and down."""
GLM5_NORMS = 18432 + 4 * 6144


def test_what_rests_of_glm5_by_stage(tmp_path: Path) -> None:
    footprints = {x.setting.stage: x.resting for x in plan(glm5(tmp_path), 8, "96GiB").footprints if not x.setting.recompute}
    trained, states = GLM5_MATRICES + GLM5_NORMS, 4 * (GLM5_MATRICES + 2 * GLM5_NORMS)
    rotary = 256 // 2 * 4 * 2  # inverse frequencies, kept twice by transformers
    frozen, bucket = GLM5_FROZEN + rotary, min(trained, 500_000_000)
    assert footprints[0] == (frozen, 4 * trained, 0, 4 * trained, 0, states, 0)
    assert footprints[1] == (frozen, 2 * trained, 0, 4 * trained + 2 * 4 * bucket, trained // 2, states // 8, 0)
    assert footprints[2] == (frozen, 2 * trained, 0, trained // 2 + 2 * 2 * bucket, trained // 2, states // 8, 0)
    split = (frozen // 8, trained // 4, frozen + 2 * trained, trained // 2 + 2 * bucket, trained // 2, states // 8, 0)
    assert footprints[3] == pytest.approx(split, abs=1)


def test_offloading_moves_masters_and_states_to_the_host(tmp_path: Path) -> None:
    here, there = (
        plan(glm5(tmp_path, deepspeed={"offload_optimizer": offload}), 8, "96GiB").footprints[2].resting
        for offload in (False, True)
    )
    assert (there.masters, there.optimizer) == (0, 0)
    assert there.host == here.masters + here.optimizer + (here.gradients - there.gradients)


def test_recompute_and_fewer_steps_hold_less_and_every_step_costs_the_same(tmp_path: Path) -> None:
    kept = {
        (steps, recompute): estimate.footprint(Setting("cuda", 2, 8, 2, recompute, 1)).moment.kept
        for steps in range(1, 5)
        for estimate in [Estimate(glm5(tmp_path, **{"train.loss": {"ttt_steps": steps}}), 2, False)]
        for recompute in (False, True)
    }
    assert all(kept[steps, True] < kept[steps, False] for steps in range(1, 5))
    assert {kept[steps + 1, False] - kept[steps, False] for steps in range(1, 4)} == {kept[2, False] - kept[1, False]}


# --- sizes -------------------------------------------------------------------------------------------------------------


def test_it_needs_no_data_and_no_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert [path.name for path in (VERIFIERS / "glm5").iterdir()] == ["config.json"]
    result = plan(glm5(tmp_path), 1, "96GiB")
    assert (result.tokens, result.token_bytes, result.estimate.draft.draft_vocab_size) == (None, 4 * 6144 * 2, 32000)
    planning.table(result)
    printed = capsys.readouterr().out
    assert "per million tokens: x 4 layers x 6144 x 2 bytes = 49.15 GB" in printed
    assert "all of them supervised" in printed and "embed_tokens 1.8 GiB" in printed


def test_disk_is_what_extract_writes(tmp_path: Path, toy: Path) -> None:
    config = prepared_run(tmp_path, toy)
    result = plan(config, 1, "1GiB")
    written = 0
    for path in config.hidden_states_path.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            written += file.get_tensor("hidden_states").nbytes
    assert result.tokens and result.tokens * result.token_bytes == written


def test_the_draft_is_the_one_that_training_makes(tmp_path: Path, toy: Path) -> None:
    from eagle3_fast.train.start import start_draft

    config = prepared_run(tmp_path, toy)
    draft = start_draft(config)
    weights = Estimate(config, 4, False).weights
    assert weights.trained == sum(x.numel() for x in draft.parameters() if x.requires_grad)
    held = sum(x.nbytes for x in (*draft.parameters(), *draft.buffers()))
    assert weights.frozen_bytes == held - 4 * weights.trained


@pytest.mark.parametrize(
    ("train", "vocabulary", "aux"),
    [
        ({"draft": {}}, 6000, 3),
        ({"draft": {"draft_vocab_size": 500, "target_layer_ids": [1, 3]}}, 500, 2),
    ],
)
def test_vocabulary_and_aux_layers_come_from_the_run_file(tmp_path: Path, train: dict, vocabulary: int, aux: int) -> None:
    draft = plan(sized_run(tmp_path, **train), 1, "8GiB").estimate.draft
    assert (draft.draft_vocab_size, draft.num_aux) == (vocabulary, aux)


def test_a_draft_to_start_from_brings_its_sizes(tmp_path: Path) -> None:
    from model.drafts import config_data

    write_json(tmp_path / "draft" / "config.json", config_data(eagle_aux_hidden_state_layer_ids=None))
    config = sized_run(tmp_path, draft={"from_pretrained": str(tmp_path / "draft"), "target_layer_ids": [1, 2]})
    draft = plan(config, 1, "8GiB").estimate.draft
    assert (draft.transformer_layer_config.hidden_size, draft.num_aux) == (32, 2)


def test_a_draft_vocabulary_beyond_the_verifiers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="draft_vocab_size 6001 exceeds the verifier's vocabulary 6000"):
        plan(sized_run(tmp_path, draft={"draft_vocab_size": 6001}), 1, "8GiB")


# --- what fits ---------------------------------------------------------------------------------------------------------


def test_the_recommended_setting_fits_and_is_the_cheapest_that_does(tmp_path: Path) -> None:
    config = glm5(tmp_path, **{"train.loss": {"ttt_steps": 7}})
    chosen = {memory: plan(config, 8, memory).fitting for memory in ("96GiB", "20GiB")}
    assert all(chosen.values())
    assert [(x.setting.stage, x.setting.recompute) for x in chosen.values() if x] == [(2, False), (2, True)]
    assert recommendation(plan(config, 1, "96GiB")).startswith("engine.recompute=false engine.accumulation=8 ")
    assert recommendation(plan(config, 8, "96GiB")).startswith("deepspeed.stage=2 engine.recompute=false engine.accumulation=1 ")


def test_the_remedy_of_a_shortfall_is_the_longest_batch_that_fits(tmp_path: Path) -> None:
    change = {"train.loss": {"ttt_steps": 7}}
    with pytest.raises(
        InputError, match=r"nothing fits 8 x 16.0 GiB.* too much; train.data.total_seq_len=(\d+) would fit"
    ) as caught:
        recommendation(plan(glm5(tmp_path, **change), 8, "16GiB"))
    assert "\n" not in str(caught.value)
    rows = int(str(caught.value).partition("total_seq_len=")[2].split()[0])
    shape = {"hidden_states_dtype": "bfloat16"}
    fitting, beyond = (
        plan(glm5(tmp_path, **change, **{"train.data": {**shape, "total_seq_len": length}}), 8, "16GiB")
        for length in (rows, rows + 256)
    )
    assert fitting.fitting is not None and beyond.fitting is None


def test_an_online_run_that_cannot_hold_its_verifier_stops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole verifier beside the draft: 61 GiB of Qwen3-32B on a card of 40 GiB."""
    run_file = tmp_path / "run.yaml"
    write_json(run_file, {"train": {"verifier": {"verifier_name_or_path": str(VERIFIERS / "qwen3-32b")}}})
    words = ["plan", "--config", str(run_file), "--gpus", "8", "--gpu-memory", "40GiB", "train.draft.draft_vocab_size=32000"]
    assert main(words) == 0
    assert "recommended: deepspeed.stage=2" in capsys.readouterr().out
    assert main([*words, "--online"]) == 2
    printed = capsys.readouterr()
    assert "verifier" in printed.out  # the table is shown all the same
    (line,) = printed.err.splitlines()
    assert "the verifier alone takes 61.0 GiB" in line and "without --online" in line


@pytest.mark.parametrize("text", ["96", "96 Gb", "GiB", "-1GiB", "0GiB", "96KiB"])
def test_memory_without_a_known_unit_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="--gpu-memory"):
        parse_bytes(text)


def test_memory_with_a_unit_is_read() -> None:
    assert (parse_bytes("96GiB"), parse_bytes("1.5 GB"), parse_bytes("512MiB")) == (96 * 2**30, 1_500_000_000, 2**29)


def test_what_cannot_be_planned_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "training_device", lambda: "cpu")
    with pytest.raises(InputError, match="give --gpu-memory"):
        plan(sized_run(tmp_path), 1)
    with pytest.raises(InputError, match="--gpus 0"):
        plan(sized_run(tmp_path), 0, "8GiB")


def test_training_warns_once_where_the_machine_is_too_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(planning, "training_device", lambda: "cpu")
    config = sized_run(tmp_path)
    with caplog.at_level("WARNING", logger="eagle3_fast"):
        warn_if_too_big(config)
        assert not caplog.records
        monkeypatch.setattr(os, "sysconf", lambda name: 2**14)  # 256 MiB
        warn_if_too_big(config, ranks=2, stage=3)
    (record,) = caplog.records
    assert "this run is estimated to need" in record.getMessage() and "this machine has 0.2 GiB" in record.getMessage()


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({name: measure(Path(sys.argv[1]), case) for name, case in MEASURED.items()}))

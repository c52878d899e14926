"""Keys of speculators' releases: what each becomes, and that the page about them tells what the code does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from eagle3_fast.config import RunConfig, load_run_config
from eagle3_fast.errors import InputError
from eagle3_fast.spellings import ALGORITHMS, KEYS, canonical, key_at

DOCS = Path(__file__).parent.parent / "docs"
VERIFIER = {"verifier": {"verifier_name_or_path": "verifier"}}


def read(folder: Path, document: dict[str, Any], overrides: list[str] | None = None) -> RunConfig:
    (folder / "run.yaml").write_text(yaml.safe_dump(document))
    return load_run_config(folder / "run.yaml", overrides)


def here(config: RunConfig, path: str) -> Any:
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


def section(text: str, first: str, last: str) -> str:
    return text[text.index(first) : text.index(last)]


def rows(text: str) -> list[list[str]]:
    """Cells of the body rows of Markdown tables."""
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip(" |") for cell in row] for row in cells]


PAGE = (DOCS / "speculators-keys.md").read_text(encoding="utf-8")
CONTRACT = (DOCS / "speculators.md").read_text(encoding="utf-8")


def test_the_page_holds_every_key_as_the_code_has_it() -> None:
    told: dict[str, list[str]] = {}
    for part in PAGE.split("\n## ")[1:]:
        title, _, body = part.partition("\n")
        if title.startswith("`train") or title.startswith("Keys of releases"):
            told |= {row[0].strip("`"): row for row in rows(body.split("These are accepted")[0])}
    known = {key.name: key for key in KEYS if key.group not in ALGORITHMS}
    assert told.keys() == known.keys()
    for name, (_, default, verdict, *why) in told.items():
        key = known[name]
        assert verdict == key.verdict, name
        values = [json.loads(text) for text in re.findall(r"`([^`]+)`", default)]
        assert (values or [None]) == [key.effective], name
        assert key.why in " ".join(why), name
        assert key.place in (None, "own") or f"`{key.place}`" in why[0], name
        assert all(f"`{json.dumps(value)}`" in why[0] for value in key.takes or ()), name
    others = {
        row[0].strip("`"): re.findall(r"`(\w+)`", row[1])
        for row in rows(section(PAGE, "## Other algorithms", "## Keys of releases"))
    }
    assert others == {group: [key.name for key in KEYS if key.group == group] for group in ALGORITHMS}


def test_same_means_that_our_default_is_theirs() -> None:
    plain = RunConfig.model_validate({"train": {"verifier": {"verifier_name_or_path": ""}}})
    for key in KEYS:
        if key.verdict == "same" and key.name != "verifier_name_or_path":
            assert here(plain, key.path) == key.effective, key.path
        elif key.here is not None:
            here(plain, key.here)


def test_every_key_of_the_contract_is_known() -> None:
    current = section(CONTRACT, "### 7.3", "### 7.4")
    names = {name for row in current.splitlines() if row.startswith("|") for name in re.findall(r"`(\w+)`", row.split("|")[2])} - {
        "YAML"
    }
    others = section(current, "Other algorithm groups", "set under eagle3")
    names |= {name for name in re.findall(r"\w+", others.partition(":")[2]) if "_" in name}
    assert len(names) > 80
    assert names <= {key.name for key in KEYS}, names - {key.name for key in KEYS}
    older = set(re.findall(r"`(--[\w-]+)`", section(CONTRACT, "### 7.2", "Scheduler fields")))
    assert len(older) == 16
    assert older - {"--no-resume-from-checkpoint"} <= {key.flag for key in KEYS}
    assert older == {row[0].strip("`") for row in rows(PAGE[PAGE.index("## Flags of 0.3") :])}


def test_a_key_stands_in_one_place() -> None:
    assert len({key.path for key in KEYS}) == len({key.name for key in KEYS}) == len(KEYS)


@pytest.mark.parametrize("document", [VERIFIER, {"train": VERIFIER}, {**VERIFIER, "engine": {"accumulation": 2}}])
def test_a_file_without_train_is_the_train_config(tmp_path: Path, document: dict[str, Any]) -> None:
    config = read(tmp_path, document)
    assert config.train.verifier.verifier_name_or_path == "verifier"
    assert config.engine.accumulation == (2 if "engine" in document else 1)


def test_a_config_of_0_7_is_read_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr("eagle3_fast.config.say_once", said.append)
    document = {
        **VERIFIER,
        "speculator_type": "eagle3",
        "deterministic_cuda": True,
        "draft": {"num_layers": None, "norm_before_fc": None, "draft_attn_impl": "sdpa", "embed_requires_grad": True},
        "data": {"hidden_states_path": "states", "noise_std": 0.05, "max_anchors": 3072},
        "generation": {"on_generate": "cache", "vllm_endpoint": "http://there/v1", "on_missing": "skip"},
        "loss": {"loss_fn": None, "loss_implementation": "eager"},
        "trainer": {"gradient_checkpointing": True, "save_best": True, "fsdp_shard": True},
        "dflash": {"block_size": 8},
        "mtp": {"step_weight_beta": 0.5},
    }
    config = read(tmp_path, document)
    assert (config.engine.deterministic, config.engine.recompute, config.engine.keep_last) == (True, True, 1)
    assert config.extract.hidden_states_path == "states"
    assert config.train.draft.norm_before_fc and config.train.draft.num_layers == 1
    assert len(said) == len(set(said))
    told = ("deterministic_cuda", "draft_attn_impl", "embed_requires_grad", "data.hidden_states_path", "noise_std", "max_anchors")
    for name in told:
        assert sum(name in line for line in said) == 1, name
    assert "not used by eagle3: train.dflash.block_size, train.mtp.step_weight_beta" in said
    assert not any(line.startswith(("train.draft.norm_before_fc", "train.generation.on_missing")) for line in said)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.speculator_type=peagle", "peagle is another algorithm; this trainer trains eagle3 drafts only"),
        ("train.speculator_type=eagel3", "'eagel3' is not known"),
        ("train.data.hidden_states_backend=mooncake", "hidden_states_backend mooncake is not supported"),
        ("train.draft.draft_mrope_full_head_hack=false", "draft_mrope_full_head_hack False is not supported"),
        (
            "train.draft.draft_attn_impl=flash",
            "draft_attn_impl flash is not supported.*It takes simple_flex_attention, sdpa, eager",
        ),
        ("train.draft.draft_hidden_act=gelu", "train.draft.draft_hidden_act"),
        ("train.logging.logger=tensorboard, comet", "comet is not supported; there are tensorboard, wandb, trackio, mlflow"),
        ("train.logging.run_name=a-{host}", "{host} stands for nothing; there are {time}, {utc_time}, {rank}, {local_rank}"),
        ("train.lr=1e-4", "unknown key train.lr; did you mean train.optimizer.lr?"),
        ("train.draft.ttt_steps=1", "unknown key train.draft.ttt_steps; did you mean train.loss.ttt_steps?"),
        ("train.num_workers=1", "did you mean train.data.num_workers?"),
        ("train.optimiser={lr: 1e-4}", "unknown key train.optimiser; did you mean train.optimizer?"),
        ("train.draft.draft_attn_impls=sdpa", "did you mean train.draft.draft_attn_impl?"),
        ("train.dflash.block_sizes=1", "unknown key train.dflash.block_sizes; did you mean train.dflash.block_size?"),
        ("train.draft.draft_config=x", None),
    ],
)
def test_what_is_refused_is_named(tmp_path: Path, override: str, message: str | None) -> None:
    if message is None:
        read(tmp_path, VERIFIER, [override])
        return
    with pytest.raises(InputError, match=message.replace("?", r"\?")) as caught:
        read(tmp_path, VERIFIER, [override])
    assert "\n" not in str(caught.value)


def test_two_spellings_of_one_thing_must_agree(tmp_path: Path) -> None:
    both = {**VERIFIER, "trainer": {"save_best": True}, "engine": {"keep_last": 3}}
    with pytest.raises(InputError, match="engine.keep_last, to 3 and 1; keep one|engine.keep_last, to 1 and 3; keep one"):
        read(tmp_path, both)
    both["trainer"] = {"save_best": False}
    assert read(tmp_path, both).engine.keep_last == 3
    assert read(tmp_path, both, ["train.trainer.save_best=true"]).engine.keep_last == 1
    assert read(tmp_path, {**VERIFIER, "trainer": {"save_best": True}}, ["train.trainer.save_best=false"]).engine.keep_last is None


def test_an_empty_group_is_no_group(tmp_path: Path) -> None:
    assert read(tmp_path, {**VERIFIER, "draft": None, "dflash": None}).train.draft.num_layers == 1
    with pytest.raises(InputError, match="train.draft"):
        read(tmp_path, {**VERIFIER, "draft": 3})


def test_norms_beside_a_pretrained_draft_are_not_used(tmp_path: Path) -> None:
    config = read(tmp_path, {**VERIFIER, "draft": {"from_pretrained": "x", "norm_before_fc": False, "fc_norm": True}})
    assert config.train.draft.norm_before_fc and not config.train.draft.fc_norm
    with pytest.raises(InputError, match="draft_config brings its own config, so draft_arch"):
        read(tmp_path, {**VERIFIER, "draft": {"draft_config": "x", "draft_arch": "llama"}})
    with pytest.raises(InputError, match="from_pretrained brings its own config, so draft_config"):
        read(tmp_path, {**VERIFIER, "draft": {"draft_config": "x", "from_pretrained": "y"}})


def test_keys_that_wandered_are_found_by_name() -> None:
    assert {key_at(f"train.{group}hidden_states_path") for group in ("", "data.", "backend.")} == {
        key_at("train.backend.hidden_states_path")
    }
    assert key_at("extract.hidden_states_path") is None and key_at("train.lr") is None
    assert canonical([("train.trainer.noise_std", 0.1), ("nonsense", 1)], "x")[0] == {"engine.noise_std": 0.1, "nonsense": 1}


def test_a_run_is_named_as_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(tmp_path, VERIFIER).train.logging.loggers == []
    monkeypatch.setenv("LOCAL_RANK", "3")
    named = read(tmp_path, {**VERIFIER, "logging": {"logger": "wandb, tensorboard,wandb", "run_name": "a-{rank}-{local_rank}"}})
    assert (named.train.logging.loggers, named.train.logging.name) == (["wandb", "tensorboard"], "a-0-3")
    time = r"\d{4}-\d\d-\d\dT[\d:]{8}"
    for run_name, pattern in (("{time} {utc_time}", rf"{time} {time}\+00:00"), (None, time)):
        name = read(tmp_path, {**VERIFIER, "logging": {"run_name": run_name}}).train.logging.name
        assert re.fullmatch(pattern, name)

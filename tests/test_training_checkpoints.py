"""Which checkpoints are whole, and what is removed of an older run."""

import json

import pytest
import torch
from safetensors.torch import save_file

from hf_dspark.training.checkpoints import last_checkpoint, remove_checkpoints


def checkpoint(folder, step):
    path = folder / f"checkpoint-{step}"
    path.mkdir()
    save_file({"a": torch.arange(100.0)}, path / "model.safetensors")
    torch.save({"b": torch.arange(100.0)}, path / "optimizer.pt")
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    return path


def halved(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "trainer_state.json"])
def test_the_newest_whole_checkpoint_is_found_behind_a_damaged_one(tmp_path, name):
    older, newer = checkpoint(tmp_path, 9), checkpoint(tmp_path, 10)
    assert last_checkpoint(tmp_path) == newer
    halved(newer / name)
    with pytest.warns(UserWarning, match=f"going on from checkpoint-9: checkpoint-10 is damaged .{name}"):
        assert last_checkpoint(tmp_path) == older
    halved(older / name)
    assert last_checkpoint(tmp_path) is None


def test_a_checkpoint_without_weights_is_not_whole(tmp_path):
    (checkpoint(tmp_path, 3) / "model.safetensors").unlink()
    assert last_checkpoint(tmp_path) is None and last_checkpoint(tmp_path / "nowhere") is None


def test_a_part_of_sharded_weights_that_is_missing_is_noticed(tmp_path):
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (checkpoint(tmp_path, 3) / "model.safetensors.index.json").write_text(json.dumps(index))
    assert last_checkpoint(tmp_path) is None


def test_only_checkpoints_are_removed(tmp_path):
    checkpoint(tmp_path, 3)
    kept = {"checkpoint-best", "runs", "config.json", "checkpoint-7"}
    for name in ("checkpoint-best", "runs"):
        (tmp_path / name).mkdir()
    for name in ("config.json", "checkpoint-7"):
        (tmp_path / name).write_text("a file")
    remove_checkpoints(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == kept

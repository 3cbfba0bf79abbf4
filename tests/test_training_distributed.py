"""Two processes (gloo, CPU) learn what one process learns."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from hf_dspark import DSparkDrafter
from hf_dspark.losses import LossWeights
from hf_dspark.target import TargetView
from hf_dspark.training import DSparkTrainer, DSparkTrainingArguments, TrainingExample, new_drafter
from hf_dspark.training.blocks import row_outcome
from hf_dspark.training.collation import pack_row
from hf_dspark.training.teacher import Teacher, frozen
from hf_dspark.training.trainer import call_inside
from tests.tiny import tiny_target

SCRIPT = "import sys; from tests.test_training_distributed import run; run(*sys.argv[1:])"


def run(folder, batch_size):
    """Trains, with and without a feature cache; the main process writes `result.json`."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 60, (16, 24), generator=generator).tolist()
    examples = [TrainingExample(tuple(r[: 12 + i % 12]), (0,) * 4 + (1,) * (8 + i % 12)) for i, r in enumerate(ids)]
    target, results = tiny_target("qwen3"), []
    for cache in (None, str(Path(folder) / "cache")):
        torch.manual_seed(3)
        drafter = new_drafter(target, 63, num_hidden_layers=1, block_size=4, markov_rank=8, target_layer_ids=[0, 1])
        args = DSparkTrainingArguments(
            str(folder), use_cpu=True, max_steps=6, per_device_train_batch_size=int(batch_size), learning_rate=1e-2,
            num_anchors=5, logging_steps=1, save_strategy="no", disable_tqdm=True, gradient_accumulation_steps=2,
            feature_cache=cache, feature_cache_dtype="float32",
        )  # fmt: skip
        trainer = DSparkTrainer(drafter, args, target=target, train_dataset=examples, eval_dataset=examples[:4])
        trainer.train()
        evaluated = trainer.evaluate()["eval_loss"]
        entries = [entry for entry in trainer.state.log_history if "loss" in entry]
        results.append(
            [[entry["loss"], entry["accepted_length"]] for entry in entries] + [[evaluated, args.world_size]]
        )
    trainer.save_drafter(folder)
    if args.world_size > 1:
        results.append(sharding_error())
    if trainer.is_world_process_zero():
        (Path(folder) / "result.json").write_text(json.dumps(results))


def sharding_error():
    """Largest difference of gradients between a whole drafter and one that FSDP shards over the processes."""
    target = tiny_target("qwen3")
    torch.manual_seed(3)
    drafter = new_drafter(target, 63, num_hidden_layers=2, block_size=4, markov_rank=8, target_layer_ids=[0, 1])
    ids = torch.randint(3, 60, (24,), generator=torch.Generator().manual_seed(1)).tolist()
    row = pack_row([(0, TrainingExample(tuple(ids), (0,) * 4 + (1,) * 20))]).with_anchors([[5, 9, 12]])
    view = TargetView(target, drafter)
    features = Teacher(view).features(row)

    def gradients():
        with frozen(target):
            call_inside(
                drafter, lambda: row_outcome(view, features, row, weights=LossWeights()).losses.total
            ).backward()
        return {name: parameter.grad for name, parameter in drafter.named_parameters()}

    whole = {name: gradient.clone() for name, gradient in gradients().items()}
    drafter.zero_grad()
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in drafter.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(drafter, mesh=mesh)
    return max((g.full_tensor() - whole[name]).abs().max().item() for name, g in gradients().items())


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_two_processes_have_the_loss_curve_of_one_and_shards_the_gradients_of_the_whole(tmp_path):
    shared = {
        **os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()), "PYTHONPATH": str(Path(__file__).parents[1]),
    }  # fmt: skip
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "two"), "2"]
    processes = [
        subprocess.Popen(command, env=shared | {"RANK": rank, "LOCAL_RANK": rank}, stderr=subprocess.PIPE, text=True)
        for rank in "01"
    ]
    run(tmp_path / "one", 4)
    errors = [process.communicate(timeout=300)[1] for process in processes]
    assert all(process.returncode == 0 for process in processes), errors[0][-3000:]
    one, two = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("one", "two"))
    assert two.pop() < 1e-6, "sharded gradients"
    for ours, theirs in zip(one, two, strict=True):
        assert (ours.pop()[0], 2) == pytest.approx(theirs.pop(), abs=1e-4), "evaluation loss, processes"
        assert len(ours) == 6
        for (loss, length), (other_loss, other_length) in zip(ours, theirs, strict=True):
            assert other_loss == pytest.approx(loss, abs=1e-4)
            assert other_length == pytest.approx(length, abs=1e-3)
    weights = [DSparkDrafter.from_pretrained(tmp_path / name).state_dict() for name in ("one", "two")]
    assert all(torch.allclose(weights[0][name], weights[1][name], atol=1e-4) for name in weights[0])

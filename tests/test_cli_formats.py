"""`inspect` and `convert` on the command line."""

import argparse
import json
import math
import shutil
from pathlib import Path

import pytest
from huggingface_hub.utils import SafetensorsFileMetadata, TensorInfo
from safetensors import safe_open

from hf_dspark.cli.convert import add_convert_command
from hf_dspark.cli.inspect import add_inspect_command

from . import foreign
from .drafters import AUTOREGRESSIVE, tiny_drafter
from .tiny import tiny_target

DATA = Path(__file__).with_name("data")


def run(*argv):
    """Exit status of a command."""
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(required=True)
    for add_command in (add_inspect_command, add_convert_command):
        add_command(commands)
    args = parser.parse_args([str(argument) for argument in argv])
    return args.run(args)


@pytest.mark.parametrize(
    ("folder", "said"),
    {
        "deepspec_qwen3_gated": ("DeepSpec flat", "slot layout A", "gated Markov of rank 16", "not read", "[1, 2, 4]"),
        "deepspec_gemma4_keqv": ("Gemma4DSparkModel", "2 gemma4", "keys are values", "soft-capped at 9.0"),
        "speculators_A_reduced_swa_gated": ("speculators", "36 of 64", "2 sliding: 10 tokens from the anchor, causal"),
        "speculators_B_full_mixed_vanilla": ("slot layout B", "4 drafts", "../target_qwen3", "1 sliding"),
        "specforge_dspark_full_vanilla": ("SpecForge", "5 drafts", "of 6"),
        "zlab_dflash_qwen3": ("z-lab", "DFlash, slot layout B", "no Markov, no confidence", "25, 0.1 M parameters"),
    }.items(),
)
def test_inspect_says_what_a_folder_is(capsys, folder, said):
    assert run("inspect", DATA / folder) == 0
    text = capsys.readouterr().out
    assert all(part in text for part in said), text


def test_inspect_tells_why_a_layout_without_the_key_is_b(capsys, tmp_path):
    folder = foreign.speculators(tmp_path, foreign.drafter(sample_from_anchor=False))
    fields = json.loads((folder / "config.json").read_text())
    fields.pop("sample_from_anchor")
    (folder / "config.json").write_text(json.dumps(fields))
    run("inspect", folder)
    assert "note          sample_from_anchor is missing" in capsys.readouterr().out


def test_inspect_marks_what_is_inferred(capsys, tmp_path):
    sliding = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 3}
    off = {"markov_rank": 0, "enable_confidence_head": False, "sample_from_anchor": False}
    run("inspect", foreign.zlab(tmp_path, foreign.drafter(**off), **sliding))
    text = capsys.readouterr().out
    assert "2 sliding: 3 tokens from the slot, bidirectional" in text and "is inferred" in text


def test_what_is_no_drafter_is_refused_in_one_line(capsys):
    for command in (["inspect", DATA / "target_qwen3"], ["convert", DATA / "target_qwen3", "out", "--to", "native"]):
        with pytest.raises(SystemExit) as stopped:
            run(*command)
        assert stopped.value.code == 2
        assert "language model" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {},
            (
                "hf_dspark, autoregressive",
                "autoregressive (EAGLE-3-style)",
                "5 drafts a round, a pass each",
                "64 (the",
            ),
        ),
        ({"block_size": 1, "draft_vocab_size": 20}, ("(MTP-1)", "1 draft a round", "20 of 64, with an LM head")),
    ],
    ids=["EAGLE-3-style", "MTP-1"],
)
def test_an_autoregressive_drafter_is_described_and_not_converted(capsys, tmp_path, fields, said):
    drafter = tiny_drafter(tiny_target("qwen3"), **AUTOREGRESSIVE | fields)
    drafter.save_pretrained(tmp_path / "saved")
    assert run("inspect", tmp_path / "saved") == 0
    text = capsys.readouterr().out
    size = sum(tensor.numel() for tensor in drafter.state_dict().values())
    assert all(part in text for part in (*said, "[0, 1] (0-based", f"{4 * size / 2**20:,.1f} MiB as float32")), text
    for layout in ("native", "deepspec", "speculators"):
        with pytest.raises(SystemExit):
            run("convert", tmp_path / "saved", tmp_path / "out", "--to", layout)
        assert "no other engine's layout is written for" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "out").exists()


def test_tensors_that_an_autoregressive_drafter_lacks_are_named(capsys, tmp_path):
    tiny_drafter(tiny_target("qwen3"), **AUTOREGRESSIVE).save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"draft_vocab_size": 20}))
    with pytest.raises(SystemExit):
        run("inspect", tmp_path)
    assert "lm_head.weight [20, 32] is missing" in capsys.readouterr().err


def test_convert_writes_a_folder_and_says_so(capsys, tmp_path):
    argv = ["convert", DATA / "zlab_dflash_qwen3", tmp_path / "out", "--to", "deepspec"]
    assert run(*argv, "--target", DATA / "target_qwen3") == 0
    text = capsys.readouterr().out
    assert "-> deepspec: 27 tensors" in text and "lm_head.weight" in text and str(tmp_path / "out") in text
    with pytest.raises(SystemExit):
        run(*argv)
    assert "force" in capsys.readouterr().err
    assert run(*argv, "--force") == 0


def test_inspect_of_a_hub_repository_fetches_headers_only(capsys, tmp_path, monkeypatch):
    commit, folder = "0123456789abcdef0123456789abcdef01234567", DATA / "specforge_dspark_full_vanilla"
    repository = tmp_path / "models--org--drafter"
    (repository / "snapshots" / commit).mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    shutil.copy(folder / "config.json", repository / "snapshots" / commit)  # the weights are not in the cache
    with safe_open(folder / "model.safetensors", "pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}
        infos = {
            name: TensorInfo("F32", part.get_shape(), (0, 4 * math.prod(part.get_shape())))
            for name, part in slices.items()
        }
    asked = []

    def fetch(repo_id, filename, **options):
        asked.append((repo_id, filename, options))
        return SafetensorsFileMetadata({}, infos)

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("hf_dspark.formats.checkpoint.parse_safetensors_file_metadata", fetch)
    monkeypatch.setattr("hf_dspark.cli.inspect.hub_options", lambda args: {"cache_dir": tmp_path, "revision": "main"})
    assert run("inspect", "org/drafter") == 0
    assert "SpecForge" in capsys.readouterr().out
    assert asked == [("org/drafter", "model.safetensors", {"revision": "main"})]

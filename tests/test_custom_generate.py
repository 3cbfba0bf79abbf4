"""A `custom_generate` folder decodes with its drafter, and its text is plain generate's."""

import argparse
import sys

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM

from hf_dspark.cli.export_generate import add_export_generate_command
from hf_dspark.custom_generate import export_generate
from hf_dspark.outputs import DSparkGenerateOutput
from tests.drafters import assert_drafted, left_padded, tiny_drafter
from tests.tiny import tiny_target

OPTIONS = {"max_new_tokens": 12, "do_sample": False}


@pytest.fixture(autouse=True)
def modules(tmp_path, monkeypatch):
    """Code of repositories is kept apart from the user's."""
    folder = tmp_path / "modules"
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(folder))
    monkeypatch.syspath_prepend(str(folder))


@pytest.fixture
def drafter_folder(tmp_path):
    tiny_drafter(tiny_target("qwen3")).save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def test_a_folder_given_to_generate_decodes_with_its_drafter(tmp_path, drafter_folder):
    target, inputs = tiny_target("qwen3"), left_padded([3, 9])
    plain = target.generate(**inputs, **OPTIONS)
    folder = export_generate(tmp_path / "recipe", drafter=drafter_folder)
    output = target.generate(
        **inputs, **OPTIONS, custom_generate=str(folder), trust_remote_code=True, return_dict_in_generate=True
    )
    assert isinstance(output, DSparkGenerateOutput) and torch.equal(output.sequences, plain)
    assert_drafted(output.rounds)


def test_a_drafter_of_the_call_takes_the_place_of_the_folders(tmp_path):
    target, inputs, rounds = tiny_target("qwen3"), left_padded([4]), []
    folder = export_generate(tmp_path / "recipe", drafter="nobody/nothing")
    view = tiny_drafter(target, seed=1).with_options(on_round=rounds.append)
    for own in ({"drafter": view}, {"assistant_model": view}):
        rounds.clear()
        output = target.generate(**inputs, **OPTIONS, custom_generate=str(folder), trust_remote_code=True, **own)
        assert torch.equal(output, target.generate(**inputs, **OPTIONS))
        assert_drafted(rounds)


def test_in_a_targets_own_folder_every_call_decodes_with_the_drafter(tmp_path, drafter_folder):
    folder = tmp_path / "target"
    tiny_target("qwen3").save_pretrained(folder)
    export_generate(folder, drafter=drafter_folder, embed=True)
    assert not AutoModelForCausalLM.from_pretrained(folder).__dict__.get("generate")  # code runs only where trusted
    target, inputs = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True), left_padded([3, 9])
    plain = tiny_target("qwen3").generate(**inputs, **OPTIONS)
    for _ in range(2):
        output = target.generate(**inputs, **OPTIONS, return_dict_in_generate=True)
        assert torch.equal(output.sequences, plain)
        assert_drafted(output.rounds)


def test_the_readme_has_the_tag_and_the_requirement_names_the_package(tmp_path, drafter_folder):
    folder = export_generate(tmp_path / "recipe", drafter=drafter_folder)
    assert "custom_generate" in ModelCard.load(folder / "README.md").data.tags
    assert (folder / "custom_generate" / "requirements.txt").read_text() == "hf-dspark\n"


def test_what_is_there_is_not_written_over(tmp_path, drafter_folder):
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "README.md").write_text("mine")
    export_generate(folder, drafter=drafter_folder)
    assert (folder / "README.md").read_text() == "mine"
    with pytest.raises(ValueError, match="is there already"):
        export_generate(folder, drafter=drafter_folder)
    with pytest.raises(ValueError, match="needs its folder"):
        export_generate(tmp_path / "other", drafter="me/drafter", embed=True)
    with pytest.raises(ValueError, match="holds no drafter"):
        export_generate(tmp_path / "other", drafter=folder)


def test_without_the_package_the_code_says_what_to_install(tmp_path, monkeypatch):
    folder = export_generate(tmp_path / "recipe", drafter="me/drafter")
    monkeypatch.setitem(sys.modules, "hf_dspark.custom_generate", None)
    code = compile((folder / "custom_generate" / "generate.py").read_text(), "generate.py", "exec")
    with pytest.raises(ImportError, match="pip install hf-dspark"):
        exec(code, {"__name__": "remote"})


def test_the_command_writes_the_folder(tmp_path, drafter_folder, capsys):
    parser = argparse.ArgumentParser()
    add_export_generate_command(parser.add_subparsers())
    args = parser.parse_args(["export-generate", str(tmp_path / "out"), "--drafter", str(drafter_folder), "--embed"])
    assert args.run(args) == 0 and "custom_generate" in capsys.readouterr().out
    assert {p.name for p in (tmp_path / "out" / "drafter").iterdir()} == {"config.json", "model.safetensors"}
    with pytest.raises(SystemExit):
        args.run(args)

"""Plain mistakes on the command line: one line that says what is wrong, before anything is loaded; no traceback."""

import json
from pathlib import Path

import pytest

from hf_dspark import cli
from hf_dspark.cli.mistakes import TRACEBACK_VARIABLE

DATA = Path(__file__).with_name("data")
TARGET, DRAFTER = DATA / "target_qwen3", DATA / "deepspec_qwen3_gated"


@pytest.fixture
def prompts(tmp_path, monkeypatch):
    """A prompt file, and no model that could be loaded."""

    def loaded(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", loaded)
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"turns": ["hello"]}) + "\n")
    return path


def said(capsys, *arguments):
    """What a command that refuses says in its last line."""
    try:
        status = cli.main(list(map(str, arguments)))
    except SystemExit as stopped:
        status = stopped.code
    error = capsys.readouterr().err
    assert status in (1, 2) and "Traceback" not in error
    return error.splitlines()[-1]


@pytest.mark.parametrize("command", ["calibrate", "evaluate", "prepare-data", "profile"])
@pytest.mark.parametrize(
    "target, drafter, expected",
    [
        ("/nope", DRAFTER, "--target /nope: there is no folder /nope"),
        (DATA, DRAFTER, "data holds no config.json"),
        (TARGET, "/nope", "--drafter /nope: there is no folder with a config.json"),
        (TARGET, TARGET, "it is no drafter (model_type 'qwen3'"),
        (DRAFTER, DRAFTER, "it is a drafter (model_type 'qwen3'"),
    ],
)
def test_a_wrong_folder_is_refused_before_anything_is_loaded(prompts, command, target, drafter, expected, capsys):
    named = ("--target", target, "--drafter", drafter, "--output", prompts.parent / "output")
    assert expected in said(capsys, command, *(() if command == "profile" else (prompts,)), *named)


@pytest.mark.parametrize("device, expected", [("foo", "--device foo: "), ("cuda:99", "--device cuda:99: ")])
@pytest.mark.parametrize("command", ["evaluate", "prepare-data", "profile"])
def test_a_device_that_is_not_there_is_refused(prompts, command, device, expected, capsys):
    arguments = () if command == "profile" else (prompts,)
    output = ("--output", prompts.parent / "output")
    assert expected in said(capsys, command, *arguments, *output, "--device", device)


@pytest.mark.parametrize("command", ["calibrate", "evaluate", "prepare-data", "profile"])
def test_an_output_that_cannot_be_written_is_refused_before_anything_is_loaded(prompts, command, capsys, monkeypatch):
    monkeypatch.setattr("os.access", lambda *args, **kwargs: False)
    arguments = () if command == "profile" else (prompts,)
    assert "nothing can be written to" in said(capsys, command, *arguments, "--output", prompts.parent / "output")


@pytest.mark.parametrize("command", ["inspect", "convert"])
@pytest.mark.parametrize(
    "config, expected",
    [
        (None, "holds no config.json"),
        ("[]", "it must hold a JSON object, but holds a list"),
        ("{", "config.json is no config"),
        ({"architectures": 3}, "wrong type"),
        ({"hidden_size": "wide"}, "wrong type"),
        ({"block_size": "5"}, "wrong type"),
    ],
)
def test_a_broken_folder_is_named(tmp_path, command, config, expected, capsys):
    if config is not None:
        given = json.loads((DRAFTER / "config.json").read_text())
        text = config if isinstance(config, str) else json.dumps({**given, **config})
        (tmp_path / "config.json").write_text(text)
        (tmp_path / "model.safetensors").write_bytes((DRAFTER / "model.safetensors").read_bytes())
    more = (tmp_path / "out", "--to", "native") if command == "convert" else ()
    assert expected in said(capsys, command, tmp_path, *more)


@pytest.mark.parametrize("source", ["/nope", "./nope", "a/b/c"])
def test_what_can_only_be_a_path_is_not_looked_for_on_the_hub(source, capsys, monkeypatch):
    monkeypatch.setattr("transformers.PreTrainedConfig.get_config_dict", None)
    assert f"there is no folder {source}" in said(capsys, "inspect", source)


@pytest.fixture
def failing(monkeypatch):
    """Makes `inspect` raise an exception."""

    def install(error):
        def describe(*args, **kwargs):
            raise error

        monkeypatch.setattr("hf_dspark.formats.description.describe_drafter", describe)

    return install


@pytest.mark.parametrize("error", [RuntimeError("a defect"), TypeError("a defect"), AttributeError("a defect")])
def test_a_defect_keeps_its_traceback(failing, error):
    failing(error)
    with pytest.raises(type(error), match="a defect"):
        cli.main(["inspect", str(DRAFTER)])


def test_a_variable_brings_the_tracebacks_back(monkeypatch, capsys):
    def broken(*args):
        raise OSError("the disk\nis full")

    arguments = ["profile", "--max-batch-tokens", "2"]
    monkeypatch.setattr("hf_dspark.cli.profile.load_demo_pair", broken)
    with monkeypatch.context() as patch:
        patch.setattr("hf_dspark.cli.profile._load_pair", broken)
        assert cli.main(arguments) == 1
        assert capsys.readouterr().err == "error: the disk is full\n"
        patch.setenv(TRACEBACK_VARIABLE, "1")
        with pytest.raises(OSError, match="the disk"):
            cli.main(arguments)

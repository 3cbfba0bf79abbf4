"""Teacher features on disk: what comes back, what a shard is, and what all of it weighs."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_dspark.target import TargetView
from hf_dspark.training import TrainingExample, feature_cache
from hf_dspark.training.collation import pack_row
from hf_dspark.training.feature_cache import FeatureCache, estimate_bytes
from hf_dspark.training.teacher import Teacher
from tests.drafters import tiny_drafter
from tests.test_training import examples, fresh, losses_of, target, train  # noqa: F401
from tests.tiny import tiny_target


def texts(count, length=30):
    ids = torch.randint(3, 60, (count, length), generator=torch.Generator().manual_seed(0)).tolist()
    return [TrainingExample(tuple(row[: length - i % 5]), (1,) * (length - i % 5)) for i, row in enumerate(ids)]


def teacher_of(family="gemma2", **overrides):
    pair = tiny_target(family)
    return Teacher(TargetView(pair, tiny_drafter(pair, **overrides)))


@pytest.mark.parametrize("overrides", [{}, {"draft_vocab_size": 20}], ids=str)
def test_features_from_disk_are_those_of_the_target(tmp_path, overrides):
    teacher, documents = teacher_of(**overrides), texts(3)
    FeatureCache(tmp_path, teacher, "float32").build(documents)
    again = FeatureCache(tmp_path, teacher, "float32")
    teacher.features = None  # the target is not asked again
    row = pack_row(list(enumerate(documents[:2])))
    found, direct = again.features(row), teacher_of(**overrides).features(row)
    assert torch.allclose(found.context, direct.context, atol=1e-5)
    assert torch.allclose(found.log_probs, direct.log_probs, atol=1e-4)
    if overrides:
        assert torch.equal(found.top_ids, direct.top_ids)


def test_texts_that_are_missing_are_added_and_nothing_is_computed_twice(tmp_path):
    teacher, documents = teacher_of(), texts(4)
    cache = FeatureCache(tmp_path, teacher)
    cache.build(documents[:2])
    size = sum(path.stat().st_size for path in tmp_path.rglob("shard-*"))
    cache.build(documents[:2])
    assert sum(path.stat().st_size for path in tmp_path.rglob("shard-*")) == size
    assert documents[3] not in cache
    cache.features(pack_row([(3, documents[3])]))
    assert documents[3] in FeatureCache(tmp_path, teacher)


def test_the_estimate_is_within_five_percent_of_32_samples_on_disk(tmp_path):
    teacher, documents = teacher_of(), texts(32, 150)
    estimate = estimate_bytes(documents, num_layers=2, hidden_size=32, dtype=torch.bfloat16)
    FeatureCache(tmp_path, teacher, "bfloat16").build(documents)
    real = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert abs(estimate - real) < 0.05 * real


def test_another_target_other_layers_or_another_dtype_never_share_features(tmp_path):
    folders = [FeatureCache(tmp_path, teacher_of(), "float32").folder]
    folders.append(FeatureCache(tmp_path, teacher_of(), "bfloat16").folder)
    folders.append(FeatureCache(tmp_path, teacher_of(target_layer_ids=[1]), "float32").folder)
    folders.append(FeatureCache(tmp_path, teacher_of("qwen3"), "float32").folder)
    twin = teacher_of()
    with torch.no_grad():
        twin.view.target.model.norm.weight += 1
    folders.append(FeatureCache(tmp_path, twin, "float32").folder)
    with torch.no_grad():
        twin.view.target.model.norm.weight -= 1
    assert len(set(folders)) == 5
    assert FeatureCache(tmp_path, teacher_of(markov_rank=4), "float32").folder == folders[0]


def test_a_half_written_shard_is_never_read(tmp_path, monkeypatch):
    teacher, documents = teacher_of(), texts(2)
    real = feature_cache.save_file

    def fails(tensors, path, metadata=None):
        real(tensors, path)
        with open(path, "r+b") as file:
            file.truncate(100)
        raise OSError("disk full")

    monkeypatch.setattr(feature_cache, "save_file", fails)
    cache = FeatureCache(tmp_path, teacher)
    with pytest.raises(OSError, match="disk full"):
        cache.build(documents)
    monkeypatch.setattr(feature_cache, "save_file", real)
    assert [path.name for path in cache.folder.iterdir()] == ["manifest.json"]
    (cache.folder / ".x.incomplete").write_bytes(b"half")
    again = FeatureCache(tmp_path, teacher)
    assert documents[0] not in again
    again.build(documents)
    assert documents[0] in again


def test_training_from_disk_learns_what_training_online_does(target, examples, tmp_path):  # noqa: F811
    steps = {"max_steps": 5, "per_device_train_batch_size": 2}
    online = train(target, fresh(target), examples, tmp_path / "a", **steps)
    cached = train(
        target, fresh(target), examples, tmp_path / "b", feature_cache=str(tmp_path / "cache"),
        feature_cache_dtype="float32", **steps,
    )  # fmt: skip
    assert losses_of(cached) == pytest.approx(losses_of(online), rel=1e-4)
    half = train(target, fresh(target), examples, tmp_path / "c", feature_cache=str(tmp_path / "cache"), **steps)
    assert losses_of(half) == pytest.approx(losses_of(online), rel=0.02)
    assert len(list((tmp_path / "cache").iterdir())) == 2


def flipped(path):
    data = bytearray(path.read_bytes())
    data[-5] ^= 64
    path.write_bytes(data)


def halved(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def without_numbers(path):
    tensors = {name: t * float("nan") if "context" in name else t for name, t in load_file(path).items()}
    save_file(tensors, path)  # and without checksums


@pytest.mark.parametrize("damage", [flipped, halved, without_numbers])
def test_a_damaged_shard_is_made_again_with_one_warning(tmp_path, monkeypatch, damage):
    teacher, documents, said = teacher_of(), texts(3), []
    monkeypatch.setattr(feature_cache.logger, "warning", said.append)
    cache = FeatureCache(tmp_path, teacher, "float32")
    for document in documents[:2]:
        cache.build([document])
    for path in cache.folder.glob("shard-*"):
        damage(path)
    again, row = FeatureCache(tmp_path, teacher, "float32"), pack_row(list(enumerate(documents)))
    assert torch.allclose(again.features(row).context, teacher.features(row).context, atol=1e-5)
    assert torch.equal(again.features(row).context, FeatureCache(tmp_path, teacher, "float32").features(row).context)
    assert len(said) == 1 and "damaged" in said[0]


def test_a_path_that_cannot_be_a_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "cache"):
        with pytest.raises(ValueError, match="cannot be used as a folder") as raised:
            FeatureCache(path, teacher_of())
        assert str(path) in str(raised.value)


def test_features_that_are_no_numbers_are_never_written(tmp_path):
    teacher = teacher_of()
    teacher.features(pack_row([(0, texts(1)[0])]))  # of the first text, its arithmetic is looked at too
    weight = teacher.view.target.model.norm.weight.detach()
    own = weight.clone()
    try:
        weight.fill_(float("inf"))
        with pytest.raises(FloatingPointError, match="not finite"):
            FeatureCache(tmp_path, teacher).build(texts(1))
    finally:
        weight.copy_(own)  # other tests share the target
    assert not list(tmp_path.rglob("shard-*"))

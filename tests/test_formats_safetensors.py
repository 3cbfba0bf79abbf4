"""Headers and byte ranges: what the format's own library reads and writes, read and written here."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_dspark.formats.safetensors_files import read_header, write_checkpoint, write_file

TENSORS = {
    "float": torch.arange(12.0).view(3, 4),
    "half": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
    "flags": torch.tensor([True, False, True]),
    "ids": torch.arange(5),
    "odd": torch.arange(3, dtype=torch.uint8),
    "scalar": torch.tensor(2.5),
    "none": torch.empty(0, 4),
    "tiny": torch.ones(2, dtype=torch.float8_e4m3fn),
}


@pytest.fixture
def file(tmp_path):
    save_file(TENSORS, tmp_path / "theirs.safetensors", metadata={"format": "pt"})
    return tmp_path / "theirs.safetensors"


def test_a_header_tells_every_tensor_and_each_loads_as_it_is(file):
    refs = read_header(file)
    assert refs.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        loaded = refs[name].load()
        assert loaded.dtype == tensor.dtype and loaded.shape == tensor.shape
        assert torch.equal(loaded.view(torch.uint8) if name == "tiny" else loaded, _plain(name))


def _plain(name):
    tensor = TENSORS[name]
    return tensor.view(torch.uint8) if name == "tiny" else tensor


def test_what_is_written_is_what_the_library_reads(file, tmp_path):
    write_file(tmp_path / "ours.safetensors", read_header(file))
    ours = load_file(tmp_path / "ours.safetensors")
    assert ours.keys() == TENSORS.keys()
    assert all(
        torch.equal(ours[name].view(torch.uint8) if name == "tiny" else ours[name], _plain(name)) for name in ours
    )


def test_rows_of_a_tensor_are_a_range_of_its_bytes(file):
    assert torch.equal(read_header(file)["float"].rows(1, 2).load(), TENSORS["float"][1:])


def test_a_tensor_that_is_not_aligned_still_loads(file, tmp_path):
    whole = file.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    odd = tmp_path / "odd.safetensors"
    odd.write_bytes((length + 1).to_bytes(8, "little") + whole[8 : 8 + length] + b" " + whole[8 + length :])
    assert torch.equal(read_header(odd)["float"].load(), TENSORS["float"])


def test_a_file_that_was_cut_off_is_refused(file):
    whole = file.read_bytes()
    for length in (4, 20, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="cut off"):
            read_header(file)


def test_a_loaded_tensor_may_be_written_to_without_touching_its_file(file):
    before = file.read_bytes()
    read_header(file)["float"].load().zero_()
    assert file.read_bytes() == before


def test_shards_hold_every_tensor_once(file, tmp_path):
    write_checkpoint(tmp_path, read_header(file), shard_bytes=40)
    files = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(files) > 2
    names = [name for path in files for name in read_header(path)]
    assert sorted(names) == sorted(TENSORS)

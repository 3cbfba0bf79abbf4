"""A growing file: what a record calls complete is there, what is behind it is cut off."""

import json

import pytest

from hf_dspark.growing_file import GrowingFile

LINES = [{"n": number, "text": "a\u2028b"} for number in range(6)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "data.jsonl"


def rows(path):
    return [json.loads(line) for line in path.read_text().removesuffix("\n").split("\n")]


def test_batches_and_sums_are_taken_up(path):
    with GrowingFile(path, {"seed": 1}) as file:
        file.append(LINES[:2], answers=2)
        file.append(LINES[2:4], answers=2)
    with GrowingFile(path, {"seed": 1}) as file:
        assert (file.batches, file.totals) == (2, {"answers": 4})
        file.append(LINES[4:], answers=2)
    assert rows(path) == LINES


@pytest.mark.parametrize("torn", [b'{"n": 4', b'{"n": 4}\n', b'{"n": 4}\n{"n": 5, "te'])
def test_what_is_behind_the_recorded_end_is_cut_off(path, torn):
    with GrowingFile(path, {}) as file:
        file.append(LINES[:4])
    complete = path.read_bytes()
    path.write_bytes(complete + torn)
    with GrowingFile(path, {}) as file:
        assert file.batches == 1
    assert path.read_bytes() == complete


def test_other_parameters_are_refused_with_what_differs(path):
    with GrowingFile(path, {"seed": 1, "sizes": (1, 2), "old": 0}) as file:
        file.append(LINES)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="seed: 1 then, 2 now; old: 0 then, null now") as error:
        GrowingFile(path, {"seed": 2, "sizes": (1, 2)})
    assert "sizes" not in str(error.value)
    assert path.read_bytes() == before


def test_a_file_without_a_record_is_nobodys_to_write(path):
    path.write_text("mine\n")
    with pytest.raises(ValueError, match="without the record"):
        GrowingFile(path, {})
    assert path.read_text() == "mine\n"


def test_lost_data_are_noticed(path):
    with GrowingFile(path, {}) as file:
        file.append(LINES)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ValueError, match="data are lost"):
        GrowingFile(path, {})


@pytest.mark.parametrize("record", ["[]", "{}", "torn", '{"parameters": {}, "done": {"batches": "x", "bytes": 0}}'])
def test_a_record_that_is_none_is_refused(path, record):
    path.with_name("data.jsonl.meta.json").write_text(record)
    with pytest.raises(ValueError, match="is no record"):
        GrowingFile(path, {})

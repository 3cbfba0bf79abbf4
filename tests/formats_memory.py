"""A drafter of a size that memory shows, on disk, that is written in no time: its files are holes, read as zeros."""

import json
import struct
from pathlib import Path

from hf_dspark import DSparkConfig
from hf_dspark.formats.plan import expected_shapes


def sparse_specforge(folder: Path, *, shards: int) -> Path:
    """A float32 drafter of about 150 MB in SpecForge's layout, with old names, in files of zeros."""
    sizes = {"vocab_size": 16384, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 2,
             "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128}  # fmt: skip
    heads = {"target_layer_ids": [1, 2, 3], "mask_token_id": 5, "markov_rank": 128}
    dflash = {"projector_type": "dspark", "enable_confidence_head": True, **heads}
    config = {"model_type": "qwen3", "block_size": 7, "dflash_config": dflash, "dtype": "float32", **sizes}
    shapes = expected_shapes(DSparkConfig(**sizes, **heads))
    names = {name: "logit_head." * ("_head" in name) + name for name in shapes}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard}.safetensors"
        header, end = {}, 0
        for name in list(shapes)[shard::shards]:
            begin, end = end, end + 4 * _product(shapes[name])
            header[names[name]] = {"dtype": "F32", "shape": shapes[name], "data_offsets": [begin, end]}
            weight_map[names[name]] = file
        encoded = json.dumps(header).encode()
        encoded += b" " * (-len(encoded) % 8)
        with (folder / file).open("wb") as stream:
            stream.write(struct.pack("<Q", len(encoded)) + encoded)
            stream.truncate(8 + len(encoded) + end)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def _product(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count

"""Drafters of sizes that memory shows, on disk, that are written in no time: their files are holes, read as zeros."""

import json
import math
import runpy
import struct
from collections.abc import Mapping
from pathlib import Path

from hf_dspark import DSparkConfig
from hf_dspark.formats.plan import expected_shapes
from hf_dspark.formats.reading import config_fields

EXAMPLE = Path(__file__).parents[1] / "examples" / "formats_at_full_size.py"


def sparse_specforge(folder: Path, *, shards: int) -> Path:
    """A float32 drafter of about 150 MB in SpecForge's layout, with old names."""
    sizes = {"vocab_size": 16384, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 2,
             "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128}  # fmt: skip
    heads = {"target_layer_ids": [1, 2, 3], "mask_token_id": 5, "markov_rank": 128}
    dflash = {"projector_type": "dspark", "enable_confidence_head": True, **heads}
    config = {"model_type": "qwen3", "block_size": 7, "dflash_config": dflash, "dtype": "float32", **sizes}
    shapes = expected_shapes(DSparkConfig(**sizes, **heads))
    named = {"logit_head." * ("_head" in name) + name: shape for name, shape in shapes.items()}
    return sparse(folder, config, named, dtype="F32", shards=shards)


def sparse_deepspec(folder: Path, shape: str, **fields) -> Path:
    """A bfloat16 drafter in DeepSpec's layout, of a size that is published: `"qwen3-4b"` or `"gemma4-12b"`."""
    example = runpy.run_path(str(EXAMPLE))
    config = example["COMMON"] | example["SHAPES"][shape] | fields
    shapes = expected_shapes(DSparkConfig.from_dict(config_fields(config)))
    return sparse(folder, config, shapes, dtype="BF16", shards=3)


def sparse(folder: Path, config: dict, shapes: Mapping[str, tuple[int, ...]], *, dtype: str, shards: int) -> Path:
    """A folder with this config and tensors of these shapes, all zeros."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    weight_map, size = {}, {"F32": 4, "BF16": 2}[dtype]
    for shard in range(shards):
        file = f"model-{shard}.safetensors"
        header, end = {}, 0
        for name in list(shapes)[shard::shards]:
            begin, end = end, end + size * math.prod(shapes[name])
            header[name] = {"dtype": dtype, "shape": shapes[name], "data_offsets": [begin, end]}
            weight_map[name] = file
        encoded = json.dumps(header).encode()
        encoded += b" " * (-len(encoded) % 8)
        with (folder / file).open("wb") as stream:
            stream.write(struct.pack("<Q", len(encoded)) + encoded)
            stream.truncate(8 + len(encoded) + end)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder

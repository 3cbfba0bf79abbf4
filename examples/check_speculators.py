"""Checks speculators exports against the speculators package, which lives in an environment of its own.

    python -m venv speculators-env && speculators-env/bin/pip install speculators
    python examples/check_speculators.py --python speculators-env/bin/python

Random drafters of several kinds are converted, loaded there by `SpeculatorModel.from_pretrained`, run over the same
anchors by both, and compared: hidden states, draft logits and confidences. Prints the largest differences.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

import torch
from safetensors.torch import load_file, save_file

ANCHORS, LENGTH = (1, 6, 12, 20, 30), 40
SIZES = {
    "vocab_size": 64,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 2,
}
DRAFTERS = {
    "vanilla": {},
    "gated, layout B": {"markov_head_type": "gated", "sample_from_anchor": False},
    "rnn, reduced vocabulary": {"markov_head_type": "rnn", "draft_vocab_size": 20},
    "sliding, causal": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 7},
    "sliding and full": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 6,
        "sliding_block_causal": False,
        "confidence_head_with_markov": False,
    },
    "no Markov head": {"markov_rank": 0},
    "DFlash": {"markov_rank": 0, "enable_confidence_head": False, "sample_from_anchor": False},
}


def run_theirs(folder: Path) -> None:
    """In their environment: what their modules compute, into a file."""
    import speculators.models.dflash.core as core
    from speculators import SpeculatorModel
    from torch.nn.attention.flex_attention import create_mask

    model = SpeculatorModel.from_pretrained(str(folder / "export")).eval()
    model.load_verifier_weights()
    model._create_mask_fn = create_mask
    model.config.transformer_layer_config._attn_implementation = "sdpa"
    inputs = load_file(folder / "inputs.safetensors")
    ids, anchors, size = inputs["ids"], torch.tensor(ANCHORS), model.block_size
    valid = torch.ones(len(anchors), dtype=torch.bool)
    with torch.no_grad(), patch.object(core, "select_anchors", lambda *args, **kwargs: (anchors, valid)):
        hidden, logits, *_ = model._backbone_forward(
            inputs["features"], ids, torch.ones(1, LENGTH), torch.zeros(1, LENGTH, 48), torch.zeros_like(ids),
            max_anchors=len(anchors),
        )  # fmt: skip
        hidden, logits = (part.view(len(anchors), size, -1) for part in (hidden, logits))
        tokens = ids[0, anchors[:, None] + torch.arange(size)]
        if not model.config.sample_from_anchor:
            tokens = torch.cat([tokens[:, :1], tokens[:, :-1]], dim=1)
        results, embeds = {"hidden": hidden, "previous": tokens}, None
        if getattr(model, "markov_head", None) is not None:
            embeds = model.markov_head.prev_embeddings(tokens)
            bias = model.markov_head.block_bias(prev_token_ids=tokens, hidden_states=hidden, prev_emb=embeds)
            logits = logits + bias
        if getattr(model, "confidence_head", None) is not None:
            fed = model.config.confidence_head_with_markov
            results["confidence"] = model.confidence_head(torch.cat([hidden, embeds], dim=-1) if fed else hidden)
    save_file({name: part.contiguous() for name, part in {**results, "logits": logits}.items()}, folder / "theirs")


def run_ours(folder: Path, name: str, target: torch.nn.Module, python: str) -> float:
    """Makes a drafter, has theirs run on its export, compares; the largest difference."""
    from hf_dspark import DSparkConfig, DSparkDrafter
    from hf_dspark.formats.convert import convert
    from hf_dspark.target import TargetView

    config = DSparkConfig(**SIZES, **DRAFTERS[name], block_size=5, mask_token_id=63, target_layer_ids=[1, 2, 4],
                          initializer_range=0.2, target_name_or_path=str(folder.parent / "target"))  # fmt: skip
    drafter = DSparkDrafter(config).eval()
    if drafter.has_own_vocabulary:
        own = torch.arange(20) * 3 + 1
        drafter.d2t.copy_(own - torch.arange(20))
        drafter.t2d.zero_()[own] = True
    drafter.save_pretrained(folder / "native")
    convert(folder / "native", folder / "export", to="speculators")
    inputs = {"ids": torch.randint(0, 63, (1, LENGTH)), "features": torch.randn(1, LENGTH, 3 * 48)}
    save_file(inputs, folder / "inputs.safetensors")
    subprocess.run([python, __file__, "--inside", str(folder)], check=True, stdout=subprocess.DEVNULL)
    theirs, view = load_file(folder / "theirs"), TargetView(target, drafter)
    largest, first = 0.0, config.block_size - config.num_drafts
    for index, anchor in enumerate(ANCHORS):
        slots = torch.tensor([[int(inputs["ids"][0, anchor]), *[63] * 4]])
        with torch.no_grad():
            hidden = drafter(
                view.noise_embeds(slots),
                inputs["features"][:, :anchor],
                position_ids=torch.arange(anchor, anchor + 5)[None],
                context_position_ids=torch.arange(anchor)[None],
            )
            previous = theirs["previous"][index, first:][None]
            logits, confidence = drafter.teacher_forced(
                hidden[:, first:], view.base_logits(hidden[:, first:]), previous
            )
        ours = {"hidden": hidden[:, first:], "logits": logits, "confidence": confidence}
        for part, value in ours.items():
            if value is not None:
                largest = max(largest, (value[0] - theirs[part][index, first:]).abs().max().item())
    return largest


def main() -> None:
    """All kinds; exit status 1 if one differs by more than 1e-4."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", help="interpreter of the environment that has speculators")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        return run_theirs(args.inside)
    if not args.python:
        parser.error("--python is needed: the interpreter of an environment with speculators")
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        target = AutoModelForCausalLM.from_config(Qwen3Config(**SIZES | {"num_hidden_layers": 6})).eval()
        target.save_pretrained(Path(folder, "target"))
        differences = {}
        for number, name in enumerate(DRAFTERS):
            Path(folder, str(number)).mkdir()
            differences[name] = run_ours(Path(folder, str(number)), name, target, args.python)
            print(f"{name:<26}largest difference {differences[name]:.1e}", flush=True)
    sys.exit(max(differences.values()) > 1e-4)


if __name__ == "__main__":
    main()

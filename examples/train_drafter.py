"""Train a drafter for the embedded target: python examples/train_drafter.py --data answers.jsonl --output my-drafter

`answers.jsonl` holds one answer of the target a line, as `prepare-data` writes them or as little as {"prompt": "...",
"completion_ids": [...]}. Without --data, the target first answers a few prompts itself, which is enough to see the
whole way, not to get a good drafter. `python -m hf_dspark train` does the same from a recipe, for any target.
"""

import argparse

import torch

from hf_dspark.demo import load_demo_target
from hf_dspark.training import (
    DSparkTrainer,
    DSparkTrainingArguments,
    frequent_token_ids,
    load_examples,
    new_drafter,
    teacher_forced_acceptance,
)
from hf_dspark.training.data import example_of

PROMPTS = (
    "A baker sells 14 loaves in the morning and twice as many in the afternoon. How many loaves is that?",
    "Write a Python function that returns the largest of three numbers.",
    "Explain in two sentences why the sky is blue.",
    "A train covers 180 km in 3 hours. How far does it go in 5 hours at the same speed?",
)


def answers_of(target, tokenizer, prompts, max_new_tokens):
    """The target's own greedy answers: what the drafter has to predict."""
    for prompt in prompts:
        chat = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
        output = target.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)
        yield {"prompt": prompt, "completion_ids": output[0, inputs["input_ids"].shape[1] :].tolist()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="*", default=[], help="JSONL files of answers by the target")
    parser.add_argument("--output", default="my-drafter", help="folder of the drafter and its checkpoints")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--block-size", type=int, default=6)
    parser.add_argument("--markov-rank", type=int, default=32)
    parser.add_argument("--draft-vocabulary", type=int, default=6144, help="most frequent tokens that may be drafted")
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--num-anchors", type=int, default=64)
    parser.add_argument("--max-new-tokens", type=int, default=96, help="of answers that are generated here")
    parser.add_argument("--feature-cache", help="folder to keep the target's features in; asked anew if not given")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    target, tokenizer = load_demo_target()
    if args.data:
        split = load_examples(args.data, tokenizer, hold_out=5)
        examples, held_out = split.train, split.evaluation
    else:
        rows = answers_of(target, tokenizer, PROMPTS, args.max_new_tokens)
        *examples, last = [example_of(row, tokenizer) for row in rows]
        held_out = [last]
    print(f"{len(examples)} examples, {sum(sum(example.loss_mask) for example in examples)} supervised tokens")

    torch.manual_seed(args.seed)
    drafter = new_drafter(
        target,
        mask_token_id=tokenizer.convert_tokens_to_ids("<repo_name>"),  # a special token that chats do not use
        draft_token_ids=frequent_token_ids(examples, args.draft_vocabulary, always=tokenizer.all_special_ids),
        num_hidden_layers=args.layers,
        block_size=args.block_size,
        markov_rank=args.markov_rank,
        target_layer_ids=[1, 8, 15, 22, 28],
    )
    arguments = DSparkTrainingArguments(
        args.output,
        max_steps=args.steps,
        num_anchors=args.num_anchors,
        learning_rate=args.learning_rate,
        warmup_steps=min(100, args.steps // 4),
        ce_weight=0.3,
        max_length=640,
        seed=args.seed,
        feature_cache=args.feature_cache,
        use_cpu=target.device.type == "cpu",
    )
    trainer = DSparkTrainer(drafter, arguments, target=target, train_dataset=examples)
    trainer.train()
    trainer.save_drafter(args.output)
    meter = teacher_forced_acceptance(target, drafter, held_out[:50])
    print(f"held-out accepted length, teacher-forced: {meter.accepted_length:.2f}")
    print(f"saved to {args.output}; use it with target.generate(..., assistant_model=drafter)")


if __name__ == "__main__":
    main()

"""A batch of prompts of different lengths, a fixed draft length, and what the drafter did."""

from hf_dspark import FixedLength
from hf_dspark.demo import load_demo_pair

target, tokenizer, drafter = load_demo_pair()  # the tokenizer pads on the left, as decoder-only models need it

questions = [
    "What is 17 + 25?",
    "Write a Python function that reverses a string.",
    "Name three animals that live in the sea, and say one thing about each of them.",
    "A box holds 6 eggs. How many boxes do 30 eggs need? Explain your answer.",
]
chats = [[{"role": "user", "content": question}] for question in questions]
inputs = tokenizer.apply_chat_template(
    chats, add_generation_prompt=True, padding=True, return_dict=True, return_tensors="pt"
)

output = target.generate(
    **inputs,
    max_new_tokens=48,
    assistant_model=drafter.with_options(scheduler=FixedLength(3)),  # verify 3 drafts a row and round
    return_dict_in_generate=True,
)

answers = output.sequences[:, inputs["input_ids"].shape[1] :]
for question, answer in zip(questions, tokenizer.batch_decode(answers, skip_special_tokens=True), strict=True):
    print(f"> {question}\n{answer}\n")
print(output.stats)

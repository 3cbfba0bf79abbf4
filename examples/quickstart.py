"""The drafter is one argument of `generate`: same text, fewer steps of the target."""

import torch

from hf_dspark.demo import load_demo_pair

target, tokenizer, drafter = load_demo_pair()
# With models of your own:
#   target = AutoModelForCausalLM.from_pretrained("...")
#   drafter = hf_dspark.DSparkDrafter.from_pretrained("...")

chat = [{"role": "user", "content": "Sara reads 12 pages a day. How many pages does she read in two weeks?"}]
inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")

plain = target.generate(**inputs, max_new_tokens=64)
drafted = target.generate(**inputs, max_new_tokens=64, assistant_model=drafter)

print(tokenizer.decode(drafted[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
print("identical to plain decoding:", torch.equal(plain, drafted))

"""Every round as an event: what was drafted, what the target made of it, and text to show at once."""

from hf_dspark import DecodingRound
from hf_dspark.demo import load_demo_pair
from hf_dspark.spans import SpanBuilder

target, tokenizer, drafter = load_demo_pair()
chat = [{"role": "user", "content": "Tell me in two sentences why leaves are green."}]
inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")

spans = SpanBuilder(tokenizer)  # one for each row; it never splits a character


def show(event: DecodingRound) -> None:
    text = "".join(span.text for span in spans.push(event) if span.kind != "rejected")
    print(f"round {event.step:2}: {event.num_accepted} of {event.verify_length} drafts accepted  {text!r}")


target.generate(**inputs, max_new_tokens=48, assistant_model=drafter.with_options(on_round=show))

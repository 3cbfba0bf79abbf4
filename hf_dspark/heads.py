"""The sequential heads and the confidence head: what corrects a parallel draft from left to right.

Contract: a Markov head turns (previous token, hidden state) into a bias on the draft logits through a rank-r latent;
the confidence head turns (hidden state, previous token) into the logit of "this draft survives". Neither has seen the
token it talks about. They know nothing about the backbone, the target or decoding.

Source: https://huggingface.co/papers/2607.05147, Eq. 4-7. Shape legend: K draft positions, D hidden, r Markov rank,
V target vocabulary (previous tokens), Vd draft vocabulary (predicted tokens).
"""

import torch
from torch import nn

from .configuration_dspark import DSparkConfig


class MarkovHead(nn.Module):
    """
    Eq. 4, the vanilla head: bias = W2 W1[x_{k-1}]. The other heads change the latent between W1 and W2.

    Heads work step by step in decoding (`step`) and over a whole teacher-forced block in training (`scan`); a head
    without a state is the same function either way.
    """

    def __init__(self, config: DSparkConfig):
        super().__init__()
        draft_vocab_size = config.draft_vocab_size or config.vocab_size
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = nn.Linear(config.markov_rank, draft_vocab_size, bias=False)

    def embed(self, previous_ids: torch.LongTensor) -> torch.Tensor:
        """`[...]` target token ids -> `[..., r]`; ids past the table (unused target rows) share its last row."""
        return self.markov_w1(previous_ids.clamp_max(self.markov_w1.num_embeddings - 1))

    def step(
        self, embeds: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """One position: `embeds [..., r]`, `hidden [..., D]` -> (`latent [..., r]`, next state)."""
        return embeds, None

    def scan(self, embeds: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """A block at once: `embeds [..., K, r]`, `hidden [..., K, D]` -> `latent [..., K, r]`."""
        return self.step(embeds, hidden)[0]

    def bias(self, latent: torch.Tensor, candidates: torch.LongTensor | None = None) -> torch.Tensor:
        """`latent [..., r]` -> `[..., Vd]`, or only the columns `candidates [..., C]` -> `[..., C]`."""
        if candidates is None:
            return self.markov_w2(latent)
        if not self.markov_w2.weight.is_floating_point():  # quantised rows cannot be picked out
            return self.markov_w2(latent).gather(-1, candidates)
        return torch.einsum("...cr,...r->...c", self.markov_w2.weight[candidates], latent)


class GatedMarkovHead(MarkovHead):
    """Eq. 5: the embedding is gated by what the backbone saw, latent = sigmoid(G[h; e]) * e."""

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        self.gate_proj = nn.Linear(config.hidden_size + config.markov_rank, config.markov_rank)

    def step(
        self, embeds: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        return torch.sigmoid(self.gate_proj(torch.cat([hidden, embeds], dim=-1))) * embeds, None


class RNNMarkovHead(MarkovHead):
    """Eq. 6: a gated recurrence along the block, its state zero before the first position."""

    def __init__(self, config: DSparkConfig):
        super().__init__(config)
        self.joint_proj = nn.Linear(config.hidden_size + 2 * config.markov_rank, 3 * config.markov_rank)

    def step(
        self, embeds: torch.Tensor, hidden: torch.Tensor, state: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if state is None:
            state = torch.zeros_like(embeds)
        gate, candidate, output = self.joint_proj(torch.cat([state, embeds, hidden], dim=-1)).chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return torch.tanh(output), gate * state + (1 - gate) * torch.tanh(candidate)

    def scan(self, embeds: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        state, latents = None, []
        for position in range(embeds.shape[-2]):
            latent, state = self.step(embeds[..., position, :], hidden[..., position, :], state)
            latents.append(latent)
        return torch.stack(latents, dim=-2)


class ConfidenceHead(nn.Module):
    """Eq. 7: the logit of the probability that a draft is accepted, given that all before it in its block were."""

    def __init__(self, config: DSparkConfig):
        super().__init__()
        self.with_markov = config.confidence_head_with_markov
        self.proj = nn.Linear(config.hidden_size + (config.markov_rank if self.with_markov else 0), 1)

    def forward(self, hidden: torch.Tensor, embeds: torch.Tensor | None) -> torch.Tensor:
        """`hidden [..., D]`, `embeds [..., r]` (`W1[x_{k-1}]`) -> logits `[...]`, float32."""
        inputs = torch.cat([hidden, embeds], dim=-1) if self.with_markov else hidden
        return nn.functional.linear(inputs.float(), self.proj.weight.float(), self.proj.bias.float()).squeeze(-1)


MARKOV_HEADS = {"vanilla": MarkovHead, "gated": GatedMarkovHead, "rnn": RNNMarkovHead}

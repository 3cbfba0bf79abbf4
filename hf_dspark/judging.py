"""Judging a round's drafts, row by row as each row chooses its tokens.

Contract: rows that take the argmax are judged by `verify_greedy`, rows that draw by `verify_sampling` on their own
entries with their own random source, rows with noise bound to places by whether the target's token there is the draft.
A batch in which all rows choose alike is judged in one call. Knows nothing about models or caches.

Shape legend: R rows, L drafted positions, N packed tokens, V vocabulary.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from .choosing import Choice, grouped, place_tokens
from .drafting import Drafts
from .rows import Row
from .verification import Verdict, verify_greedy, verify_sampling

NOTHING_LEFT = "no token can be chosen: after the logits processors, nothing is left with a probability"
NAN_LOGITS = (
    "the target's logits are nan in {}, so no token can be chosen. Check its weights and its dtype (some models "
    "overflow in float16: try bfloat16 or float32)"
)

Minding = Callable[[Sequence[int]], AbstractContextManager[None]]
"""(entries) -> within it, an error is theirs alone; or everybody's, if it is raised again."""


def nan_rows(logits: torch.Tensor, owners: Sequence[Row]) -> dict[Row, list[int]]:
    """Rows for which `logits [N, V]` hold a nan that they do not allow, with their entries; `owners [N]`: whose."""
    if all(row.allows_nan for row in owners) or not logits.isnan().any():
        return {}
    spoilt = logits.isnan().any(-1).tolist()
    rows = dict.fromkeys(row for row, nan in zip(owners, spoilt, strict=True) if nan and not row.allows_nan)
    return {row: [entry for entry, owner in enumerate(owners) if owner is row] for row in rows}


def entry_owners(rows: Sequence[Row], tokens: Sequence[Sequence[int]]) -> list[tuple[Row, list[int]]]:
    """Of every token of `tokens [R][1 + l_r]`, its row and the tokens supposed after the row's anchor, `[N]`."""
    return [
        (row, list(part[1 : depth + 1])) for row, part in zip(rows, tokens, strict=True) for depth in range(len(part))
    ]


def spoilt_by_drafts(logits: torch.Tensor, rows: Sequence[Row], lengths: Sequence[int]) -> list[int]:
    """
    Entries of rows whose nan may be their drafts' doing: in attention it spreads even to tokens that do not see it. In
    plain `generate` nobody asks what would follow a token that is not kept; without the drafts the target says what it
    says there. Rows that draw keep theirs, and fail: taking a draft back for what it is changes the law. Where nan is
    allowed, single ones are left to the processors, while one that spread leaves nothing else, and drafts are taken
    back even from rows that draw (tokens that spoil a text are then a little rarer than in plain `generate`).

    Args:
        logits (`torch.FloatTensor` of shape `[N, V]`): Of every row's anchor and verified drafts.
        rows (`Sequence[Row]` of length R), lengths (`Sequence[int]` of length R): The rows and their verify lengths.
    """
    parts = logits.isnan().split([1 + length for length in lengths])
    return [
        entry
        for entry, (row, length, nan) in enumerate(zip(rows, lengths, parts, strict=True))
        if length and (nan.all(-1).any() if row.allows_nan else nan.any() and not row.choice.draws)
    ]


def processed_scores(
    logits: torch.Tensor,
    owners: Sequence[tuple[Row, list[int]]],
    minding: Callable[[Sequence[Row]], AbstractContextManager[None]],
) -> torch.Tensor:
    """
    Scores `[N, V]`: every entry of `logits [N, V]` as its row's processors leave it.

    Args:
        owners (`Sequence` of length N): The row of each entry, and the tokens supposed after its anchor.
        minding: Keeps the errors of some rows to themselves.
    """
    scores = logits
    for group in grouped([row.choice for row, _ in owners], logits.device):
        own = [owners[entry] for entry in group.entries]
        rows = [row for row, _ in own]
        if any(row.error is not None for row in rows):
            continue  # such a row shares its choice with none, and is over

        def prefix(number: int, own: list[tuple[Row, list[int]]] = own) -> torch.Tensor | None:
            row, supposed = own[number]
            return row.supposed_ids(supposed)

        with minding(rows):
            entries = group.of(logits)
            processed = group.choice.processors.apply(entries, rows=[row.index for row in rows], prefix=prefix)
            if processed is not entries:
                scores = group.put(scores.clone() if scores is logits else scores, processed)
    return scores


def judge(
    drafts: Drafts,
    scores: torch.Tensor,
    lengths: Sequence[int],
    *,
    choices: Sequence[Choice],
    places: Sequence[int],
    minding: Minding,
) -> Verdict:
    """
    Accepts and rejects (section 2 of the losslessness laws).

    Args:
        drafts ([`Drafts`]): The round's drafts.
        scores (`torch.FloatTensor` of shape `[N, V]`): Processed scores of every row's anchor and verified drafts.
        lengths (`Sequence[int]` of length R): Verify lengths.
        choices (`Sequence[Choice]` of length R): How each row chooses.
        places (`Sequence[int]` of length R): How many new tokens each row has.
        minding ([`Minding`]): Keeps the errors of a row to itself.
    """
    if choices[0].draws and all(choice is choices[0] for choice in choices):
        with minding(range(len(choices))):
            return _sampled(choices[0], drafts, slice(None), scores, lengths)
    verdict = verify_greedy(drafts.ids.to(scores.device), scores.argmax(-1), verify_lengths=lengths)
    first = 0
    for entry, (choice, place, length) in enumerate(zip(choices, places, lengths, strict=True)):
        own = scores[first : first + 1 + length]
        first += 1 + length
        if not choice.do_sample:
            continue
        with minding([entry]):
            part = slice(entry, entry + 1)
            if choice.draws:
                judged = _sampled(choice, drafts, part, own, [length])
            else:
                judged = _bound_to_places(choice, place, drafts, part, own)
            verdict.num_accepted[part], verdict.next_ids[part] = judged.num_accepted, judged.next_ids
            if verdict.first_stands is not None and judged.first_stands is not None:
                verdict.first_stands[part] = judged.first_stands
    return verdict


def _sampled(choice: Choice, drafts: Drafts, part: slice, scores: torch.Tensor, lengths: Sequence[int]) -> Verdict:
    device = scores.device
    assert drafts.probs is not None
    return verify_sampling(
        drafts.ids[part].to(device),
        scores.softmax(-1),
        draft_probs=drafts.probs[part].to(device),
        verify_lengths=lengths,
        random_source=choice.random_source,
        draft_token_ids=None if drafts.token_ids is None else drafts.token_ids.to(device),
    )


def _bound_to_places(choice: Choice, place: int, drafts: Drafts, part: slice, scores: torch.Tensor) -> Verdict:
    assert choice.noise is not None
    ids, possible = place_tokens(scores.softmax(-1), choice.noise, place)
    verdict = verify_greedy(drafts.ids[part].to(scores.device), ids, verify_lengths=[len(scores) - 1])
    if not possible[verdict.num_accepted].all():
        raise ValueError(NOTHING_LEFT)
    return verdict

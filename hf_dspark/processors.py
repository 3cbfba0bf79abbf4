"""Logits processors, one row and one hypothetical prefix at a time.

Plain `generate` calls its processors on `[R, width]` ids and `[R, V]` logits: all rows, one common width, real tokens.
A verification needs them for several positions of every row at once, on prefixes whose tokens may yet be rejected, in
ragged order. `RowProcessors` gives each entry the scores plain `generate` would compute for that row and that prefix.
It knows processors only; who drafted the prefix and what becomes of the scores is not its business.

Processors are told apart by their exact type, since a subclass may do anything:

- prefix-free (temperature, top-k, ...): do not look at the ids; one call for all entries;
- row-wise (n-gram ban, minimum length, ...): look at the ids of the row alone; one call per entry;
- row-bound (repetition penalty, prefix constraint): carry something per batch row; reduced to that row, then row-wise;
- anything else may be bound to the batch in ways unknown here: it is called on a batch in which every row holds the
  entry, and the entry's own row is taken.

Shapes: R batch rows, N entries, V vocabulary.
"""

import copy
from collections.abc import Callable, Sequence

import torch
from transformers.generation import logits_process as stock

_RowProcessor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_VOCABULARY_FREE = frozenset(
    {
        stock.EpsilonLogitsWarper,
        stock.EtaLogitsWarper,
        stock.InfNanRemoveLogitsProcessor,
        stock.LogitNormalization,
        stock.MinPLogitsWarper,
        stock.TemperatureLogitsWarper,
        stock.TopHLogitsWarper,
        stock.TopKLogitsWarper,
        stock.TopPLogitsWarper,
        stock.TypicalLogitsWarper,
    }
)
_PREFIX_FREE = _VOCABULARY_FREE | {stock.SuppressTokensLogitsProcessor}
_ROW_WISE = frozenset(
    {
        stock.ExponentialDecayLengthPenalty,
        stock.ForcedBOSTokenLogitsProcessor,
        stock.ForcedEOSTokenLogitsProcessor,
        stock.MinLengthLogitsProcessor,
        stock.MinNewTokensLengthLogitsProcessor,
        stock.NoBadWordsLogitsProcessor,
        stock.NoRepeatNGramLogitsProcessor,
        stock.SequenceBiasLogitsProcessor,
        stock.SuppressTokensAtBeginLogitsProcessor,
        stock.WatermarkLogitsProcessor,
    }
)
_STATEFUL = {
    stock.UnbatchedClassifierFreeGuidanceLogitsProcessor: "runs a cache of its own, one token further at every call",
    stock.SynthIDTextWatermarkLogitsProcessor: "moves its watermarking context one token further at every call",
}


def stateful_reason(processors: Sequence[stock.LogitsProcessor]) -> str | None:
    """
    Why these processors cannot be asked about tokens that may be rejected.

    Args:
        processors (`LogitsProcessorList`): The processors of a `generate` call.

    Returns:
        `str`, naming the first known stateful processor and what it does, or `None` if there is none.
    """
    for processor in processors:
        for stateful_type, what_it_does in _STATEFUL.items():
            if isinstance(processor, stateful_type):
                return f"{type(processor).__name__} {what_it_does}"
    return None


class RowProcessors:
    """
    The processors of one `generate` call, applied entry by entry.

    Args:
        processors (`LogitsProcessorList`): As `generate` prepared them; never changed.
        batch_size (`int`): Batch rows R of the call, including `num_return_sequences`. If it is 1, the one row may go
            by any number.
    """

    def __init__(self, processors: Sequence[stock.LogitsProcessor], batch_size: int):
        self._processors, self._single = list(processors), batch_size == 1
        self._own = [
            None
            if type(processor) in _PREFIX_FREE
            else [_for_one_row(processor, row, batch_size) for row in range(batch_size)]
            for processor in self._processors
        ]

    @property
    def vocabulary_free(self) -> bool:
        """Whether no processor looks at ids or at token numbers, so that they work on any part of the vocabulary."""
        return all(type(processor) in _VOCABULARY_FREE for processor in self._processors)

    def of_row(self, row: int) -> stock.LogitsProcessorList:
        """The processors of one batch row alone: functions of ids `[1, width]` and scores `[1, V]`."""
        return stock.LogitsProcessorList(
            processor if own is None else own[row] for processor, own in zip(self._processors, self._own, strict=True)
        )

    def apply(
        self, scores: torch.Tensor, *, rows: Sequence[int], prefix: Callable[[int], torch.Tensor | None]
    ) -> torch.Tensor:
        """
        Processes `N` entries, each as plain `generate` would process it.

        Args:
            scores (`torch.FloatTensor` of shape `[N, V]`): Logits; left unchanged.
            rows (`Sequence[int]` of length N): Batch row of each entry.
            prefix (`Callable[[int], torch.LongTensor | None]`):
                Gives the ids `[width]` before entry n: the left-padded prompt and what was generated, or is supposed
                to have been. `None` if the text would have ended before: plain `generate` would not ask, so a
                processor that looks at ids is not asked either. Called at most once per entry, and not at all if no
                processor looks at ids.

        Returns:
            `torch.FloatTensor` of shape `[N, V]`; `scores` itself if there is nothing to do.
        """
        scores = scores.float()
        no_ids = torch.empty(len(rows), 0, dtype=torch.long, device=scores.device)
        prefixes: list[torch.Tensor | None] | None = None
        for processor, own in zip(self._processors, self._own, strict=True):
            if own is None:
                scores = processor(no_ids, scores)
                continue
            if prefixes is None:
                prefixes = [prefix(entry) for entry in range(len(rows))]
            processed = [
                entry_scores if ids is None else own[0 if self._single else row](ids[None], entry_scores)
                for row, ids, entry_scores in zip(rows, prefixes, scores.split(1), strict=True)
            ]
            scores = torch.cat(processed).float()
        return scores


def _for_one_row(processor: stock.LogitsProcessor, row: int, batch_size: int) -> _RowProcessor:
    """What `processor` is to one batch row: a function of ids `[1, width]` and scores `[1, V]`."""
    if type(processor) in _ROW_WISE:
        return processor
    if type(processor) is stock.RepetitionPenaltyLogitsProcessor:
        own = copy.copy(processor)
        if isinstance(own.prompt_ignore_length, torch.Tensor):
            own.prompt_ignore_length = own.prompt_ignore_length[row : row + 1]
        return own
    if type(processor) is stock.PrefixConstrainedLogitsProcessor:
        # Not called for the other rows at all: their constraint may have no answer to this row's prefix.
        allowed_tokens = processor._prefix_allowed_tokens_fn
        batch_id = row // processor._num_beams
        return stock.PrefixConstrainedLogitsProcessor(lambda _, ids: allowed_tokens(batch_id, ids), num_beams=1)

    def as_whole_batch(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        # Scores repeated, not expanded: plain `generate` hands out a copy, which a processor may write to.
        return processor(ids.expand(batch_size, -1), scores.repeat(batch_size, 1))[row : row + 1]

    return as_whole_batch

"""The four charts of a run, out of its rounds and what happened on its engine.

Contract: reads, draws, keeps nothing.
"""

from collections.abc import Sequence

import charts
from hf_dspark.rounds import DecodingRound
from shelf import Service


def board_of(service: Service, rounds: Sequence[DecodingRound], *, context: int, most_rows: int) -> str:
    """
    HTML of the charts.

    Args:
        service ([`~shelf.Service`]): The engine that serves the run, with its ledger.
        rounds (`Sequence[DecodingRound]`): The run's rounds so far.
        context (`int`): Tokens of the run, prompt included.
        most_rows (`int`): The most answers at once.
    """
    happened, num_drafts = service.ledger.snapshot(), service.pair.num_drafts
    running = max(happened.num_running, 1)
    asked = service.engine.scheduler, happened.newest
    expected = service.foresight.lengths(*asked, context=context, most_rows=most_rows)
    profiled, likely = [], []
    if (cost := service.engine.cost) is not None:
        table = cost.profile.to_sglang()
        profiled = list(zip(table["sample_batch_tokens"], table["sample_steps_per_sec"], strict=True))
        seconds = cost.seconds(running, num_drafts, context)
        likely = [(running + verified, 1 / float(each)) for verified, each in enumerate(seconds)]
    return charts.board(
        [
            charts.accepted_lengths([(r.num_accepted, len(r.committed_ids)) for r in rounds], most=num_drafts + 1),
            charts.verify_lengths(
                happened.loads, expected, num_running=happened.num_running, block_size=num_drafts, most_rows=most_rows
            ),
            charts.reliability(happened.bins),
            charts.step_rates(profiled, likely, happened.recent, num_running=happened.num_running),
        ]
    )

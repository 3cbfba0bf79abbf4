"""Parts of `examples/scheduler_simulation.py`: recordings, synthetic streams, cost curves, replay, oracle, figure."""

"""Curves through measured step times, and the price of a longer context: the arithmetic of `sps_profile.py`.

Contract: numbers in, numbers out, vectorised; built once, asked often. Shape legend: R rows (requests).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np


class Curve:
    """
    Linear between its points, level before the first, on along a slope after the last.

    Args:
        points (`Mapping[float, float]`): Seconds at each size. No points: 0 everywhere.
        tail (`float`, *optional*):
            Seconds per unit of size after the last point. By default the last slope between points that is not
            negative: noise must not make larger rounds look cheaper the larger they are.
    """

    def __init__(self, points: Mapping[Any, float], *, tail: float | None = None):
        self._sizes = np.array(sorted(points), dtype=float)
        self._seconds = np.array([points[size] for size in sorted(points)], dtype=float)
        if tail is None:
            slopes = np.diff(self._seconds) / np.diff(self._sizes)
            rising = slopes[slopes >= 0]
            tail = float(rising[-1]) if rising.size else 0.0
        self._tail = tail

    def __call__(self, sizes: np.ndarray | float) -> np.ndarray:
        if not self._sizes.size:
            return np.zeros_like(sizes, dtype=float)
        beyond = np.maximum(np.asarray(sizes) - self._sizes[-1], 0)
        return np.interp(sizes, self._sizes, self._seconds) + self._tail * beyond


class ContextPrice:
    """
    What longer context adds: seconds per cached token, measured between neighbouring contexts.

    Args:
        measured (`Mapping[tuple[int, int, float], float]`):
            Seconds for each (context, R, queries of a row). Shapes measured at two neighbouring contexts give the
            price between these; those with equal queries of a row are pooled, larger differences weighing more.
    """

    def __init__(self, measured: Mapping[tuple[int, int, float], float]):
        self._contexts = sorted({context for context, _, _ in measured})
        self._prices: list[Curve] = []
        for shorter, longer in zip(self._contexts, self._contexts[1:], strict=False):
            sums: dict[float, np.ndarray] = {}
            for (context, rows, queries), seconds in measured.items():
                if context == longer and (shorter, rows, queries) in measured:
                    tokens = rows * (longer - shorter)
                    extra = seconds - measured[shorter, rows, queries]
                    sums[queries] = sums.get(queries, np.zeros(2)) + (extra * tokens, tokens**2)
            prices = {queries: max(float(product / square), 0.0) for queries, (product, square) in sums.items()}
            self._prices.append(Curve(prices, tail=0.0) if prices or not self._prices else self._prices[-1])

    def seconds(self, rows: np.ndarray, queries: np.ndarray | float, context: float | None) -> np.ndarray | float:
        """Seconds beyond the smallest context for `rows` rows of `queries` queries; `None`: the smallest context."""
        total: np.ndarray | float = 0.0
        if context is None:
            return total
        last = len(self._prices) - 1
        for index, price in enumerate(self._prices):
            start, end = self._contexts[index : index + 2]
            tokens = max(context - start, 0) if index == last else min(max(context - start, 0), end - start)
            if tokens:
                total = total + rows * tokens * price(queries)
        return total

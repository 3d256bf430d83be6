"""Divisors and multiples near a number, for messages with the nearest valid sizes."""

from __future__ import annotations

import math


def nearest_multiples(value: int, unit: int) -> str:
    """Format the multiples of `unit` next to a value; `none` if both are 0 or beyond 64 bits."""
    below = value // unit * unit
    return ", ".join(str(v) for v in (below, below + unit) if 0 < v < 2**63) or "none"


def divisors(number: int) -> list[int]:
    """All divisors of a positive number, ascending, in O(√number)."""
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def nearest(valid: list[int], value: int) -> str:
    """Format the one or two valid numbers nearest to a value."""
    return ", ".join(map(str, sorted(sorted(valid, key=lambda v: (abs(v - value), v))[:2])))


def check_divides(name: str, value: int, multiple_name: str, multiple: int) -> None:
    """Raise a ValueError with the nearest divisors if a value does not divide another."""
    if multiple % value:
        raise ValueError(
            f"{name}={value} does not divide {multiple_name}={multiple}; "
            f"nearest: {name} {nearest(divisors(multiple), value)}"
        )

# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What may be said to a Budget."""

from __future__ import annotations

from typing import Optional

from ...errors import UsageError


def check_options(
    target: Optional[float],
    save: Optional[float],
    begin: float,
    reach: float,
    floor: float,
    cap: Optional[float],
    max_weight: float,
    check_interval: Optional[int],
    pull: float,
) -> float:
    """Refuse what is out of range.

    Args: as of :class:`Budget`.

    Returns:
        float: The share to execute, from either way to say it.

    Raises:
        UsageError: Names the option, its value and what would be right.
    """
    if (target is None) == (save is None):
        raise UsageError(
            f'target={target!r} and save={save!r}: give one of them, the share of the MACs to '
            'execute or to save'
        )
    if target is not None and not 0 < target <= 1:
        raise UsageError(
            f'target={target!r} must be within (0, 1], the share of the MACs to execute; 0.5 is '
            'half of them'
        )
    if save is not None and not 0 <= save < 1:
        raise UsageError(
            f'save={save!r} must be within [0, 1), the share of the MACs to save; 0.5 is half of '
            'them'
        )
    share = float(1.0 - save if save is not None else target)  # type: ignore[arg-type]
    if not 0 <= begin < reach <= 1:
        raise UsageError(
            f'begin={begin!r} and reach={reach!r} must be parts of the training with '
            '0 <= begin < reach <= 1'
        )
    if not 0 <= floor < 1:
        raise UsageError(f'floor={floor!r} must be within [0, 1)')
    if cap is not None and not share <= cap <= 1:
        raise UsageError(
            f'cap={cap!r} must be within [{share:g}, 1]: no image above the cap, and all of them '
            'at the target on average'
        )
    if not max_weight > 0:
        raise UsageError(f'max_weight={max_weight!r} must be positive')
    if not 0 <= pull <= 1:
        raise UsageError(f'pull={pull!r} must be within [0, 1]')
    if check_interval is not None and check_interval < 1:
        raise UsageError(f'check_interval={check_interval!r} must be 1 or more')
    return share

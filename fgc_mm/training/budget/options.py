# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What may be said to a BudgetHook."""

from __future__ import annotations

from typing import Optional

from ...errors import UsageError


def check_options(
    target: float,
    begin: float,
    reach: float,
    floor: float,
    cap: Optional[float],
    max_weight: float,
    check_interval: Optional[int],
    pull: float,
    backbone: str,
) -> None:
    """Refuse what is out of range.

    Args: as of :class:`BudgetHook`, ``target`` the share to execute.

    Raises:
        UsageError: Names the option, its value and what would be right.
    """
    if not 0 <= begin < reach <= 1:
        raise UsageError(
            f'BudgetHook: begin={begin!r} and reach={reach!r} must be parts of the training '
            'with 0 <= begin < reach <= 1'
        )
    if not 0 <= floor < 1:
        raise UsageError(f'BudgetHook: floor={floor!r} must be within [0, 1)')
    if cap is not None and not target <= cap <= 1:
        raise UsageError(
            f'BudgetHook: cap={cap!r} must be within [{target:g}, 1]: no image above the '
            'cap, and all of them at the target on average'
        )
    if not max_weight > 0:
        raise UsageError(f'BudgetHook: max_weight={max_weight!r} must be positive')
    if not 0 <= pull <= 1:
        raise UsageError(f'BudgetHook: pull={pull!r} must be within [0, 1]')
    if check_interval is not None and check_interval < 1:
        raise UsageError(f'BudgetHook: check_interval={check_interval!r} must be 1 or more')
    if not backbone:
        raise UsageError(
            f"BudgetHook: backbone={backbone!r} must name the model's part that the share is "
            "about, such as 'backbone'"
        )


def target_of(target: Optional[float], save: Optional[float]) -> float:
    """The share to execute, from either way to say it."""
    if (target is None) == (save is None):
        raise UsageError(
            f'BudgetHook: target={target!r} and save={save!r}: give one of them, the share of the '
            "backbone's MACs to execute or to save"
        )
    if target is not None:
        if not 0 < target <= 1:
            raise UsageError(
                f"BudgetHook: target={target!r} must be within (0, 1], the share of the backbone's "
                'MACs to execute; 0.5 is half of them'
            )
        return float(target)
    assert save is not None
    if not 0 <= save < 1:
        raise UsageError(
            f"BudgetHook: save={save!r} must be within [0, 1), the share of the backbone's MACs "
            'to save; 0.5 is half of them'
        )
    return 1.0 - save

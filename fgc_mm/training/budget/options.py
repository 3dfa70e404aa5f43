# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What may be said to a BudgetHook."""

from __future__ import annotations

from typing import Any, Optional


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
        ValueError: Names the option, its value and what would be right.
    """
    numbers = dict(begin=begin, reach=reach, floor=floor, max_weight=max_weight, pull=pull)
    for name, value in {**numbers, **({} if cap is None else dict(cap=cap))}.items():
        _check_number(name, value)
    if not 0 <= begin < reach <= 1:
        raise ValueError(
            f'BudgetHook: begin={begin!r} and reach={reach!r} must be parts of the training '
            'with 0 <= begin < reach <= 1'
        )
    if not 0 <= floor < 1:
        raise ValueError(f'BudgetHook: floor={floor!r} must be within [0, 1)')
    if cap is not None and not target <= cap <= 1:
        raise ValueError(
            f'BudgetHook: cap={cap!r} must be within [{target:g}, 1]: no image above the '
            'cap, and all of them at the target on average'
        )
    if not max_weight > 0:
        raise ValueError(f'BudgetHook: max_weight={max_weight!r} must be positive')
    if not 0 <= pull <= 1:
        raise ValueError(f'BudgetHook: pull={pull!r} must be within [0, 1]')
    if check_interval is not None and (not isinstance(check_interval, int) or check_interval < 1):
        raise ValueError(
            f'BudgetHook: check_interval={check_interval!r} must be a whole number of '
            'iterations, at least 1'
        )
    if not backbone:
        raise ValueError(
            f"BudgetHook: backbone={backbone!r} must name the model's part that the share is "
            "about, such as 'backbone'"
        )


def target_of(target: Optional[float], save: Optional[float]) -> float:
    """The share to execute, from either way to say it."""
    if (target is None) == (save is None):
        raise ValueError(
            f'BudgetHook: target={target!r} and save={save!r}: give one of them, the share of the '
            "backbone's MACs to execute or to save"
        )
    for name, value in (('target', target), ('save', save)):
        if value is not None:
            _check_number(name, value)
    if target is not None:
        if not 0 < target <= 1:
            raise ValueError(
                f"BudgetHook: target={target!r} must be within (0, 1], the share of the backbone's "
                'MACs to execute; 0.5 is half of them'
            )
        return float(target)
    assert save is not None
    if not 0 <= save < 1:
        raise ValueError(
            f"BudgetHook: save={save!r} must be within [0, 1), the share of the backbone's MACs "
            'to save; 0.5 is half of them'
        )
    return 1.0 - save


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f'BudgetHook: {name}={value!r} must be a number')

# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""A config's hooks with other settings."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from mmengine.registry import HOOKS

from fgc_mm.errors import UsageError
from fgc_mm.runtime.config.argument_types import arguments_of

Fields = dict[str, Any]
"""``'FGCHook.k'`` -> value."""

_COST_HOOKS = ('L0Hook', 'BudgetHook')


def hook_name(hook: Mapping) -> str:
    """The class a hook's config names."""
    kind = hook.get('type')
    return kind.rpartition('.')[2] if isinstance(kind, str) else getattr(kind, '__name__', '')


def fields_of(hook: Mapping) -> list[str]:
    """Arguments of a hook's constructor; of an unknown hook what the config has."""
    cls = HOOKS.get(hook_name(hook))
    if cls is None:
        return [key for key in hook if key != 'type']
    return list(arguments_of(cls)[0])


def set_fields(hooks: Sequence[Mapping], fields: Fields) -> list[dict]:
    """A list of hooks with some of their fields set.

    A number for a field that holds a schedule replaces the schedule's value, and
    its ramp stays. ``L0Hook`` and ``BudgetHook`` both decide the cost: a field of
    one that the config has not puts it in the place of the other.

    Args:
        hooks (Sequence[Mapping]): ``custom_hooks`` of a config; left as it is.
        fields (dict): Hook and field -> value.

    Raises:
        UsageError: If there is no such hook, more than one, or no such field.
    """
    changed = [dict(copy.deepcopy(hook)) for hook in hooks]
    for key, value in fields.items():
        owner, _, name = key.rpartition('.')
        hook = _find(changed, owner, key)
        if name not in fields_of(hook):
            raise UsageError(
                f'{key}: {owner} has no field {name!r}; it has {", ".join(fields_of(hook))}'
            )
        old = hook.get(name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if number and isinstance(old, Mapping) and 'value' in old:
            hook[name] = {**old, 'value': value}
        else:
            hook[name] = value
        if owner == 'BudgetHook' and name in ('target', 'save'):  # either says the budget
            hook.pop('save' if name == 'target' else 'target', None)
    return changed


def _find(hooks: list[dict], owner: str, key: str) -> dict:
    """The one hook of a class, in place of the other that decides the cost if need be."""
    names = [hook_name(hook) for hook in hooks]
    if owner in _COST_HOOKS and owner not in names:
        places = [i for i, name in enumerate(names) if name in _COST_HOOKS]
        if len(places) == 1:
            hooks[places[0]] = dict(type=owner)
            return hooks[places[0]]
    if names.count(owner) != 1:
        raise UsageError(
            f'{key}: custom_hooks of the config must have one {owner}, it has '
            f'{names.count(owner)} (there is {", ".join(names) or "nothing"}); take a config with '
            'it, say one named *_fgc_*'
        )
    return hooks[names.index(owner)]

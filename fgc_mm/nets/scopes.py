# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""Which package's network a name means."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

from mmengine.registry import MODELS, DefaultScope, Registry

from ..errors import UsageError
from ..tasks import scopes


def registry_of(kind: object, owner: str) -> Registry:
    """Where a type is registered.

    A runner sets the scope of its config. Without one the packages that are imported are asked,
    and without any of those the one that is installed.

    Args:
        kind (str | type): The type of a config.
        owner (str): Who asks, for the error.

    Raises:
        UsageError: If no package has it, or several do.
    """
    shown = kind if owner == 'Gated' else owner
    if not isinstance(kind, str) or '.' in kind or kind in MODELS.module_dict:
        return MODELS
    if DefaultScope.get_current_instance() is not None:
        with MODELS.switch_scope_and_registry(None) as registry:
            if registry is not MODELS:
                return registry
    children = dict(MODELS.children)
    if not children:
        installed = [scope for scope in scopes() if find_spec(scope) is not None]
        for scope in installed if len(installed) == 1 else []:
            import_module(f'{scope}.registry')
        children = dict(MODELS.children)
        if not children:
            choice = ' or '.join(f"'{scope}.{shown}'" for scope in installed)
            raise UsageError(
                f'{owner}: no package is imported that has {kind!r}; write '
                f'{choice or "its package in front"}, or set default_scope'
            )
    for child in children.values():
        child.import_from_location()  # may import other packages
    children = dict(MODELS.children)
    owners = [child for child in children.values() if child.get(f'{child.scope}.{kind}')]
    if len(owners) == 1:
        return owners[0]
    found = ', '.join(f'{child.scope}.{shown}' for child in owners)
    raise UsageError(
        f'{owner}: {kind!r} is in {len(owners)} of the imported packages'
        + (f' ({found}); write one of these' if owners else '; write its package in front')
        + f", as in dict(type='mmdet.{shown}'), or set default_scope"
    )


def on_every_registry(register: Callable[[Registry], None]) -> None:
    """Call something for the registry of models of every package, now or when it is imported.

    mmengine tells a function that is found in its own registry not who looked for it. So what
    has to know is registered in each of them.

    Args:
        register (Callable): Takes the registry.
    """
    for child in MODELS.children.values():
        register(child)
    add = MODELS._add_child

    def add_child(registry: Registry) -> None:
        add(registry)
        register(registry)

    MODELS._add_child = add_child

# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
"""What keeps the house in order beside the contracts of import-linter in pyproject.toml."""

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

PROJECT = Path(__file__).parents[1]
LIBRARY = PROJECT / 'fgc_mm'
MODULES = sorted(path for path in LIBRARY.rglob('*.py') if '.mim' not in path.parts)
LONGEST = 410  # lines
TASK_PACKAGES = {'mmdet', 'mmseg', 'mmpretrain'}
# Tests of several modules or of a room as a whole; all others begin with a module's name.
OF_SEVERAL = (
    'test_cli/test_bad_input',
    'test_cli/test_untrusted_checkpoints',
    'test_coupling/test_properties',
    'test_datasets/test_demo/test_readers',
    'test_datasets/test_fuzz',
    'test_macs/test_properties',
    'test_nets/test_gated_families',
)
BRITISH = re.compile(
    r'(neighbour|colour|behaviour|favour|honour|labour|grey\b|misspelt|learnt|towards\b|centre'
    r'|catalogue|artefact|licence\b|modell(ed|ing)|labell(ed|ing)|cancell(ed|ing)|travell'
    r'|(analy|optimi|seriali|normali|initiali|regulari|organi|recogni|reali|summari|visuali'
    r'|standardi|generali|minimi|maximi|utili|characteri|quanti|penali|parametri|randomi|synchroni'
    r'|vectori|equali|memori|categori|speciali|binari|customi)s(e|es|ed|er|ing|ation|ations)\b)',
    re.IGNORECASE,
)


def name_of(path: Path) -> str:
    parts = path.relative_to(PROJECT).with_suffix('').parts
    return '.'.join(parts[:-1] if parts[-1] == '__init__' else parts)


def imports(path: Path) -> Iterator[tuple[str, str]]:
    """Of each ``from x import y`` the full name of ``x``, and ``y``."""
    package = list(path.relative_to(PROJECT).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = '.'.join([*above, *filter(None, [node.module])])
            yield from ((module, alias.name) for alias in node.names)


def private(name: str) -> bool:
    return name.startswith('_') and not name.startswith('__')


def test_a_room_keeps_its_private_names():
    taken = []
    for path in MODULES:
        own = name_of(path).split('.')[1:2]
        others = set()
        for module, name in imports(path):
            room = f'{module}.{name}'.split('.')
            if room[0] == 'fgc_mm' and room[1:2] != own:
                taken += [f'{name_of(path)}: {name} of {module}'] if any(map(private, room)) else []
                others.add(name)
        # Nor by way of the module, as in `summary._plain`.
        for node in ast.walk(ast.parse(path.read_text())):
            outside = isinstance(node, ast.Attribute) and ast.unparse(node.value) in others
            if outside and private(node.attr):
                taken.append(f'{name_of(path)}: {ast.unparse(node)}')
    assert taken == []


def test_the_names_of_a_room_are_there():
    rooms = [path for path in MODULES if path.name == '__init__.py']
    for room in map(importlib.import_module, map(name_of, rooms)):
        for name in getattr(room, '__all__', ()):
            assert hasattr(room, name), f'{name} of {room.__name__}'


def at_import(node: ast.AST) -> Iterator[ast.AST]:
    """What runs when a module is imported, or is read by a type checker."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and 'TYPE_CHECKING' in ast.unparse(child.test):
            continue
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield child
            yield from at_import(child)


def test_the_packages_of_tasks_are_imported_when_they_are_used():
    early = []
    for path in MODULES:
        for node in at_import(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or '']
            packages = {name.split('.')[0] for name in names}
            early += [f'{path}:{node.lineno}'] if packages & TASK_PACKAGES else []
    assert early == []


def test_no_file_is_long():
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in MODULES}
    assert {name: n for name, n in lengths.items() if n > LONGEST} == {}


def texts() -> dict[Path, str]:
    """Code and pages."""
    folders = ('fgc_mm', 'configs', 'tools', 'tests', 'benchmarks', 'experiments', 'docs')
    found = [path for folder in folders for path in (PROJECT / folder).rglob('*.*')]
    return {
        path: path.read_text()
        for path in (*found, *PROJECT.glob('*.md'))
        if path.suffix in ('.py', '.sh', '.md', '.js', '.j2', '.css', '.txt')
        and '.mim' not in path.parts
        and path != Path(__file__)
    }


def test_the_spelling_is_american():
    wrong = [
        f'{path.relative_to(PROJECT)}:{number}: {word[0]}'
        for path, text in texts().items()
        for number, line in enumerate(text.splitlines(), 1)
        for word in [BRITISH.search(line)]
        if word
    ]
    assert wrong == []


def test_scripts_and_modules_that_are_named_are_there():
    ours = r'(?<![\w/.])(?:tools/|(?:fgc_mm|tests|benchmarks|experiments|docs)/[a-z0-9_/]*)'
    named = re.compile(rf'{ours}[a-z0-9_]+\.(?:py|sh|md|txt)\b')
    wrong = [
        f'{path.relative_to(PROJECT)}: {name}'
        for path, text in texts().items()
        for name in set(named.findall(text))
        if not (PROJECT / name).exists()
    ]
    assert wrong == []


def test_the_tests_of_a_module_are_found_by_its_name():
    lost = []
    for path in sorted((PROJECT / 'tests').rglob('test_*.py')):
        folders = path.relative_to(PROJECT / 'tests').parts[:-1]
        rooms = [folder.removeprefix('test_') for folder in folders]
        # Beside the rooms of the library, tests/ has those of tools/, experiments/, ...
        room = next((r for r in (LIBRARY, PROJECT) if r.joinpath(*rooms).is_dir()), PROJECT)
        names = [module.stem for module in room.joinpath(*rooms).glob('*.py')]
        known = f'test_({"|".join(names)})(_|$)'
        where = '/'.join([*folders, path.stem])
        if folders and folders[0] != 'test_configs' and not re.match(known, path.stem):
            lost += [where] if not where.startswith(OF_SEVERAL) else []
    assert lost == []

"""Mixer name -> class. Built-ins are files of `archsearch_plugins`, third parties an entry point.

One-off files named in a study (`plugins: [./my_mixer.py]`) are registered by path. The name of a
mixer is the name of its module. Two plugins of one name are an error. Listing names imports none.
"""

import contextlib
import hashlib
import importlib
import importlib.util
import pkgutil
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

from archsearch.errors import FOREIGN_FAULTS, InfeasibleError, PluginError, nearest
from archsearch.mixer import Mixer
from archsearch.space import Field, Part, Parts, Value, fields_of

BUILTIN_PACKAGE = "archsearch_plugins"
ENTRY_POINT_GROUP = "archsearch.mixers"
_FILE_MODULE_PREFIX = "archsearch_study_plugin_"
_files: dict[str, Path] = {}


def _sources() -> dict[str, str]:
    """Mixer name -> module to import, for everything installed."""
    spec = importlib.util.find_spec(BUILTIN_PACKAGE)
    assert spec is not None and spec.submodule_search_locations is not None
    found = {
        module.name: f"{BUILTIN_PACKAGE}.{module.name}"
        for module in pkgutil.iter_modules(spec.submodule_search_locations)
    }
    for point in entry_points(group=ENTRY_POINT_GROUP):
        if point.name in found:
            raise PluginError(
                f"two mixers are called '{point.name}': {found[point.name]} and {point.value}; "
                "rename one of the entry points"
            )
        found[point.name] = point.value
    return found


def mixer_names() -> tuple[str, ...]:
    """Names of every mixer that a study can use, sorted. Imports no plugin."""
    return tuple(sorted({*_sources(), *_files}))


def add_plugin_file(path: Path) -> str:
    """Register a one-off mixer file; its mixer is named after the file. Returns that name.

    A copy of a file that is already registered changes nothing.

    Raises:
        PluginError: the file does not exist, is no Python file in UTF-8, or its name is taken.
    """
    path = path.resolve()
    name = path.stem
    if path.suffix != ".py" or not path.is_file():
        raise PluginError(f"plugin {path} is not a Python file; a plugin is a path to one .py file")
    try:
        path.read_text("utf-8")
    except UnicodeDecodeError as error:
        # Python could read it by its coding line, but workers and bundles get it as text.
        raise PluginError(f"plugin {path} is not UTF-8 at byte {error.start}; save it so") from None
    if name in _sources():
        raise PluginError(f"plugin {path} would be a second mixer called '{name}'; rename the file")
    if name in _files and _files[name].read_bytes() == path.read_bytes():
        return name
    if name in _files:
        raise PluginError(f"two plugin files are called '{name}': {_files[name]} and {path}")
    _files[name] = path
    return name


@cache
def _plugin_folder() -> tempfile.TemporaryDirectory[str]:
    """One folder a process; removed when the process ends."""
    return tempfile.TemporaryDirectory(prefix="archsearch-plugins-")


def add_plugin_source(name: str, source: str) -> str:
    """As `add_plugin_file`, for a file that arrives as text; one content, one path."""
    folder = Path(_plugin_folder().name) / hashlib.sha256(source.encode()).hexdigest()[:16]
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.py"
    path.write_text(source, "utf-8")
    return add_plugin_file(path)


def forget_plugin_file(name: str) -> None:
    """Undo `add_plugin_file`: the name is free again, and the file is read anew if it returns."""
    del _files[name]
    sys.modules.pop(_FILE_MODULE_PREFIX + name, None)
    load_mixer.cache_clear()


def _import(name: str) -> ModuleType:
    if name not in _files:
        return importlib.import_module(_sources()[name])
    module_name = _FILE_MODULE_PREFIX + name
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, _files[name])
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look their own module up while being made
    try:
        # Not the loader's `exec_module`, which would leave byte code beside the user's file.
        exec(compile(_files[name].read_bytes(), _files[name], "exec"), vars(module))
    except BaseException:
        del sys.modules[module_name]
        raise
    return module


@cache
def load_mixer(name: str) -> type[Mixer]:
    """Import one mixer and return its class.

    Raises:
        PluginError: no such mixer, or its module fails to import or does not define exactly one.
    """
    names = mixer_names()
    if name not in names:
        raise PluginError(
            f"no mixer '{name}'{nearest(name, names)}; installed mixers: {', '.join(names)}"
        )
    try:
        module = _import(name)
    except FOREIGN_FAULTS as error:
        raise PluginError(f"mixer '{name}' fails to import: {error!r}") from error
    classes = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, Mixer)
        and value.__module__ == module.__name__
    ]
    if len(classes) != 1:
        raise PluginError(
            f"mixer '{name}': {module.__name__} defines {len(classes)} Mixer classes; "
            "a plugin file defines exactly one"
        )
    return classes[0]


def mixer_fields(name: str) -> Mapping[str, Field]:
    """Fields of a mixer's config with types, defaults and declared ranges."""
    try:
        return fields_of(load_mixer(name).Config)
    except TypeError as error:
        raise PluginError(f"mixer '{name}': {error}") from error


def channel_mixer_names() -> tuple[str, ...]:
    """Names of the mixers that can follow every other, sorted. Imports all; leaves broken ones out.

    See `archsearch.mixer.Mixer.per_token`.
    """
    found = []
    for name in mixer_names():
        with contextlib.suppress(PluginError):
            if load_mixer(name).per_token and "ratio" in mixer_fields(name):
                found.append(name)
    return tuple(found)


def default_parts(name: str) -> Parts:
    """Parts of a composite mixer if none are given; none for every other mixer."""
    return load_mixer(name).Config.parts


def written_out(name: str, values: Mapping[str, Value]) -> dict[str, Value]:
    """Every field of a mixer by name, defaults filled in and aliases read."""
    defaults = {key: field.default for key, field in mixer_fields(name).items()}
    return dict(sorted((defaults | _named(name, values)).items()))


def part_of(name: str, config: Mixer.Config) -> Part:
    """The values of all fields of a config."""
    return Part(name, {key: getattr(config, key) for key in sorted(mixer_fields(name))})


def _named(name: str, values: Mapping[str, Value]) -> dict[str, Value]:
    """Values of fields as they are written in hashes."""
    fields = mixer_fields(name)
    return {
        key: fields[key].named(value) if key in fields else value for key, value in values.items()
    }


def make_config(
    name: str, d_model: int, values: Mapping[str, Value], parts: Parts = ()
) -> Mixer.Config:
    """Build a mixer's config from plain values; what is not given takes its default.

    Raises:
        PluginError: an unknown field, or parts of a mixer that has none.
        InfeasibleError: the mixer's own rules exclude these values (its `ValueError`).
    """
    fields = mixer_fields(name)
    for key in values:
        if key not in fields:
            raise PluginError(
                f"mixer '{name}' has no field '{key}'{nearest(key, fields)}; "
                f"its fields: {', '.join(fields) or 'none'}"
            )
    parts = parts or default_parts(name)
    if parts and not default_parts(name):
        raise PluginError(f"mixer '{name}' is not made of mixers, so it has no parts")
    try:
        return load_mixer(name).Config(d_model=d_model, parts=parts, **_named(name, values))
    except ValueError as error:
        raise InfeasibleError(f"mixer '{name}': {error}") from error


def canonical_config(
    name: str, d_model: int, values: Mapping[str, Value], parts: Parts = ()
) -> Mixer.Config | None:
    """The config that stands for these values and all that make the same module.

    None if the mixer's own rules exclude them or its code fails: a trial of it will say what is
    wrong.
    """
    try:
        return make_config(name, d_model, values, parts).canonical()
    except FOREIGN_FAULTS:
        return None

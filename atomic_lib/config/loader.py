# SPDX-License-Identifier: Apache-2.0
"""From a parameter file and a notebook's own values to one validated configuration."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from atomic_lib.config.coerce import accepts_none, build, nearest_names
from atomic_lib.config.runs import NOTEBOOK_CONFIGS, RunConfig


@dataclass(frozen=True, kw_only=True)
class LoadedConfig:
    """A validated configuration and where each of its values came from.

    `origins` maps every field to "default" (the class), "file" (params/<notebook>/<run>.yaml) or
    "override" (a value of the notebook's parameters cell, or papermill's, that differs from both).
    """

    notebook: str
    config: RunConfig
    origins: dict[str, str]

    @property
    def run_id(self) -> str:
        """Name of the run folder under outputs/."""
        return f"{self.notebook}-{self.config.run}"


def read_parameter_file(path: Path) -> dict[str, Any]:
    """Reads one YAML parameter file.

    Raises FileNotFoundError (with the runs that exist beside it) or ValueError if it is no mapping.
    """
    path = Path(path)
    if not path.is_file():
        runs = sorted(other.stem for other in path.parent.glob("*.yaml"))
        hint = f"{path.parent.name} has {', '.join(runs)}" if runs else f"no {path.parent} folder"
        raise FileNotFoundError(f"parameter file {path} does not exist; {hint}")
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"parameter file {path} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"parameter file {path} must be a mapping of names to values")
    return values


def load_config(notebook: str, values: Mapping[str, Any], *, root: Path) -> LoadedConfig:
    """Builds the configuration of `notebook` from its parameter file and `values`.

    params/<notebook>/<run>.yaml (`run` is taken from `values`) is read first and `values` replace
    it. None means "as in the file"; write "none" to replace a file's value by nothing. A run
    without a file is allowed if `values` has all that is needed, and there None is None. Raises
    ValueError or TypeError naming the parameter, its value and the valid ones.
    """
    if notebook not in NOTEBOOK_CONFIGS:
        raise ValueError(f"notebook: {notebook!r}; {nearest_names(notebook, NOTEBOOK_CONFIGS)}")
    config_class = NOTEBOOK_CONFIGS[notebook]
    given = {name: value for name, value in values.items() if value is not None}
    if not isinstance(given.get("run"), str):
        raise ValueError(f"run: {given.get('run')!r} is not a run name; give one, e.g. 'smoke'")
    path = Path(root) / "params" / notebook / f"{given['run']}.yaml"
    if path.is_file() or set(given) == {"run"}:  # without a file this lists the runs that exist
        from_file = read_parameter_file(path)
    else:
        from_file = {}
        given |= {name: None for name in values if accepts_none(config_class, name)} | given
    if from_file.get("run", given["run"]) != given["run"]:
        raise ValueError(f"run: {path} says {from_file['run']!r}; it must be {given['run']!r}")
    config = build(config_class, {**from_file, **given})
    origins = _origins(config, from_file)
    return LoadedConfig(notebook=notebook, config=config, origins=origins)


def _origins(config: RunConfig, from_file: Mapping[str, Any]) -> dict[str, str]:
    file_config = {}
    if from_file:
        whole = {
            **{field.name: getattr(config, field.name) for field in fields(config)},
            **from_file,
        }
        built = build(type(config), whole)
        file_config = {name: getattr(built, name) for name in from_file}
    origins = {}
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name in file_config and file_config[field.name] == value:
            origins[field.name] = "file"
        elif field.name not in file_config and _is_default(field, value):
            origins[field.name] = "default"
        else:
            origins[field.name] = "override"
    return origins


def _is_default(field, value) -> bool:
    if callable(field.default_factory):
        return value == field.default_factory()
    return value == field.default

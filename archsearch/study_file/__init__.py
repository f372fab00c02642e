"""A study's YAML file becomes a StudySpec, or an error that names every mistake and its line.

`reading` starts at the top of the file, `model`, `task` and `objectives` read its larger sections,
`stack` the layers of a model, `mixers` one layer, `fields` what narrows it, in the words of
`grammar`. `idle` finds fields that make no difference, `checks` limits that leave nothing to
search, and `schema` says the same grammar to editors.
"""

from archsearch.study_file.reading import load_study, plugin_files
from archsearch.study_file.schema import study_schema

__all__ = ["load_study", "plugin_files", "study_schema"]

"""Published architectures by name: layouts composed of installed mixers.

`layouts` builds them, `published` lists them with their sources and published sizes, `project`
finds the nearest relative of one in a study's space.
"""

from archsearch.architectures.project import project
from archsearch.architectures.published import (
    PUBLISHED,
    Published,
    architecture_names,
    published_architecture,
)

__all__ = ["PUBLISHED", "Published", "architecture_names", "project", "published_architecture"]

"""Kernel families for sequence mixers. Depends on torch only; imports no backend until asked.

A family is a folder: its `__init__` holds the one public function and says what it computes,
`reference.py` is the definition, and every other module is a backend held to it.
"""

from archsearch_kernels.family import REFERENCE, Call, Family, Sizes, families, family, resolve

__all__ = ["REFERENCE", "Call", "Family", "Sizes", "families", "family", "resolve"]

"""archsearch: architecture search for language-model sequence mixers.

Importing this package loads no service library (Ray, MLflow, SQLAlchemy, Typer), no GPU library
and touches no device; `tests/test_policies.py` holds it to that.
"""

__version__ = "0.1.0"

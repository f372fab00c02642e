"""MLflow shows studies; the database is the truth, and MLflow can be rebuilt from it.

`encoding` flattens a trial, `view` is one study in MLflow, `publisher` keeps it up to date in the
background or brings it up to date at once. mlflow itself is loaded when it is first used.
"""

from archsearch.tracking.publisher import Publisher, check_mlflow, summary_address, sync

__all__ = ["Publisher", "check_mlflow", "summary_address", "sync"]

"""Alembic's entry: run the migrations on the connection that `store` hands over.

There is no alembic.ini; `archsearch.store` upgrades a database when it is opened. Our version table
is apart from Optuna's, whose tables live at the same URL.
"""

from alembic import context

context.configure(
    connection=context.config.attributes["connection"],
    version_table=context.config.attributes["version_table"],
)
context.run_migrations()

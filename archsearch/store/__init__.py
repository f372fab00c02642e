"""The store: everything that is known of every study, in one database. The only persistent truth.

`reading` is for everyone, `ledger` for the one coordinator that holds a study. `tables` says what
is kept, `database` how it is opened and upgraded. Optuna's tables live at the same URL, as a view.
"""

from archsearch.store.reading import Store

__all__ = ["Store"]

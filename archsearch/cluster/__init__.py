"""Running trials on Ray, local or a cluster: submit, wait, cancel. The only home of Ray.

`cluster` submits and listens; `nodes` knows which machines may be used; `greeting`, `process` and
`worker` are what runs on them; `connection` starts or finds Ray; `arrivals` is what the coordinator
hears.
"""

from archsearch.cluster.arrivals import Alive, Answer, Arrival, Gone, News, Returned, Up
from archsearch.cluster.cluster import Cluster
from archsearch.cluster.worker import BEAT_S, RUN_TRIAL

__all__ = [
    "BEAT_S",
    "RUN_TRIAL",
    "Alive",
    "Answer",
    "Arrival",
    "Cluster",
    "Gone",
    "News",
    "Returned",
    "Up",
]

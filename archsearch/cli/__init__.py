"""The command line. Reads arguments, calls the module that does the work, prints what it returns.

`app` is the frame; `running`, `stored`, `installed` and `bench` hold the commands. Everything heavy
is imported inside the command that needs it, so that `--help` is quick.
"""

from archsearch.cli import bench, installed, running, stored
from archsearch.cli.app import app, main

__all__ = ["app", "bench", "installed", "main", "running", "stored"]

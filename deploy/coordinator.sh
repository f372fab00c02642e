#!/bin/sh
# coordinator.sh STUDY.yaml [options of `archsearch run`]: join the cluster, then run the study, or
# go on with it.
set -eu
ray start --address=ray-head:6379 --num-cpus=0 --num-gpus=0
exec archsearch run --address auto --mlflow "$MLFLOW_TRACKING_URI" "$@"

#!/usr/bin/env bash
# An MLflow server on the head that only the head can reach; see it through `ssh -L 5000:127.0.0.1:5000`.
# A server that is already running stays: the second one exits because the port is taken.
set -eu
mkdir -p ~/mlflow
export MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false # nothing but tracking
setsid -f ~/raytrain-gpt/bin/mlflow server --host 127.0.0.1 --port 5000 --workers 1 \
  --backend-store-uri "sqlite:///$HOME/mlflow/mlflow.db" --artifacts-destination ~/mlflow/artifacts \
  > ~/mlflow/server.log 2>&1 < /dev/null

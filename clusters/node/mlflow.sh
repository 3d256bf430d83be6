#!/usr/bin/env bash
# Start an MLflow server on the head that only the head can reach; open it with `ssh -L 5000:127.0.0.1:5000`.
# A server that is already running is kept: the new one exits because the port is taken.
set -eu
mkdir -p ~/mlflow
export MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false # tracking only
setsid -f ~/raytrain-gpt/bin/mlflow server --host 127.0.0.1 --port 5000 --workers 1 \
  --backend-store-uri "sqlite:///$HOME/mlflow/mlflow.db" --artifacts-destination ~/mlflow/artifacts \
  > ~/mlflow/server.log 2>&1 < /dev/null

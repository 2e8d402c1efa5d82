#!/usr/bin/env bash
# Create the inputs of docker/compose.yaml: random secrets in private files, and your user id. Existing secrets are kept.
set -euo pipefail
cd "$(dirname "$0")"
umask 077
mkdir -p secrets ../runs
random() { head -c 24 /dev/urandom | base64 | tr '+/' '-_'; }
for name in db_password admin_password train_password flask_key; do
  [ -s "secrets/$name" ] || printf %s "$(random)" > "secrets/$name"
done
# Credentials of training in the format of MLflow's clients; docker/mlflow-users.py creates the user.
printf '[mlflow]\nmlflow_tracking_username = hpcdist\nmlflow_tracking_password = %s\n' "$(cat secrets/train_password)" \
  > secrets/mlflow_credentials
printf 'HPCDIST_UID=%s\nHPCDIST_GID=%s\n' "$(id -u)" "$(id -g)" > .env
echo "secrets are in docker/secrets; the UI's user is admin, the password in docker/secrets/admin_password"

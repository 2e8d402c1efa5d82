#!/usr/bin/env bash
# Make what docker/compose.yaml reads: random secrets in files that are yours alone, and who you are. Existing ones stay.
set -euo pipefail
cd "$(dirname "$0")"
umask 077
mkdir -p secrets ../runs
random() { head -c 24 /dev/urandom | base64 | tr '+/' '-_'; }
for name in db_password admin_password train_password flask_key; do
  [ -s "secrets/$name" ] || printf %s "$(random)" > "secrets/$name"
done
# What training gets, in the form that MLflow's clients read: a user of its own, which docker/mlflow-users.py creates.
printf '[mlflow]\nmlflow_tracking_username = hpcdist\nmlflow_tracking_password = %s\n' "$(cat secrets/train_password)" \
  > secrets/mlflow_credentials
printf 'HPCDIST_UID=%s\nHPCDIST_GID=%s\n' "$(id -u)" "$(id -g)" > .env
echo "secrets are in docker/secrets; the UI's user is admin, the password in docker/secrets/admin_password"

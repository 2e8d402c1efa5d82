#!/usr/bin/env bash
# Make what docker/compose.yaml reads: random secrets in files that are yours alone, and who you are. Existing ones stay.
set -euo pipefail
cd "$(dirname "$0")"
umask 077
mkdir -p secrets ../runs
random() { head -c 24 /dev/urandom | base64 | tr '+/' '-_'; }
for name in db_password admin_password flask_key; do
  [ -s "secrets/$name" ] || printf %s "$(random)" > "secrets/$name"
done
# In the form that MLflow's clients read.
printf '[mlflow]\nmlflow_tracking_username = admin\nmlflow_tracking_password = %s\n' "$(cat secrets/admin_password)" \
  > secrets/mlflow_credentials
printf 'HPCDIST_UID=%s\nHPCDIST_GID=%s\n' "$(id -u)" "$(id -g)" > .env
echo "secrets are in docker/secrets; the UI's user is admin, the password in docker/secrets/admin_password"

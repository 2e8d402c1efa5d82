#!/bin/sh
# Start MLflow's server. Its secrets are files: db_password, admin_password and flask_key in $MLFLOW_SECRETS_DIR. MLflow
# gets them by its environment, because other users can read arguments.
set -eu
folder=${MLFLOW_SECRETS_DIR:-/run/secrets}

secret() {
  file=$folder/$1
  [ -s "$file" ] || { echo "mlflow-server: the secret $file is missing, empty or not readable for uid $(id -u)" >&2; exit 2; }
  cat "$file"
}
PGPASSWORD=$(secret db_password)
MLFLOW_AUTH_ADMIN_PASSWORD=$(secret admin_password)
MLFLOW_FLASK_SERVER_SECRET_KEY=$(secret flask_key)
export PGPASSWORD MLFLOW_AUTH_ADMIN_PASSWORD MLFLOW_FLASK_SERVER_SECRET_KEY

umask 077
export MLFLOW_AUTH_CONFIG_PATH="${TMPDIR:-/tmp}/basic_auth.ini"
cat > "$MLFLOW_AUTH_CONFIG_PATH" <<INI
[mlflow]
default_permission = READ
database_uri = $DB_URI
admin_username = ${MLFLOW_AUTH_ADMIN_USERNAME:-admin}
authorization_function = mlflow.server.auth:authenticate_request_basic_auth
INI
export MLFLOW_BACKEND_STORE_URI="$DB_URI"
# The server stores and serves artifacts, so that clients need no access to its storage.
exec mlflow server --app-name basic-auth --workers "${MLFLOW_WORKERS:-2}" \
  --serve-artifacts --artifacts-destination /artifacts "$@"

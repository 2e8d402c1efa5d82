#!/bin/sh
# As in the official image: starts as root, reads the secret and creates the database, and runs the server as `postgres`.
set -eu
as_postgres() { setpriv --reuid=postgres --regid=postgres --init-groups "$@"; }
mkdir -p "$PGDATA"
chown postgres:postgres "$PGDATA"
chmod 700 "$PGDATA"
if [ ! -s "$PGDATA/PG_VERSION" ]; then
  install -o postgres -m 600 "$POSTGRES_PASSWORD_FILE" /tmp/password
  as_postgres initdb --username="$POSTGRES_USER" --pwfile=/tmp/password \
    --auth-host=scram-sha-256 --auth-local=trust >/dev/null
  rm /tmp/password
  echo "host all all all scram-sha-256" >>"$PGDATA/pg_hba.conf"
  as_postgres pg_ctl -w -o "-c listen_addresses=''" start >/dev/null
  as_postgres createdb --username="$POSTGRES_USER" "$POSTGRES_DB"
  as_postgres pg_ctl -w stop >/dev/null
fi
exec setpriv --reuid=postgres --regid=postgres --init-groups "$@"

#!/bin/sh
# Run once by the PostgreSQL image, for an empty data folder: an owner of the tables, and a role that may log in.
# What that role needs besides is granted by what `cdc-replay setup --dry-run` prints.
set -eu
psql --no-psqlrc --set=ON_ERROR_STOP=1 --set=role="$ROLE_NAME" --set=password="$ROLE_PASSWORD" \
    --set=database="$POSTGRES_DB" --username="$POSTGRES_USER" --dbname="$POSTGRES_DB" <<'SQL'
create role owner;
alter database :"database" owner to owner;
create role :"role" login password :'password';
SQL

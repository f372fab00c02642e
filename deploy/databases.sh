#!/bin/sh
# Roles, databases and schemas: ours with Optuna's tables, and MLflow's. Runs again at every start,
# so that a new password in .env is set and a new version's schema upgrades are made.
set -eu
here=$(dirname "$0")

PGPASSWORD=$POSTGRES_PASSWORD psql --no-psqlrc --quiet --set ON_ERROR_STOP=1 \
  --file "$here/databases.sql" "postgresql://postgres@$POSTGRES/postgres"

# has ROLE TABLE: is there such a table in the role's database?
has() {
  psql --no-psqlrc -At -c "SELECT to_regclass('$2') IS NOT NULL" "postgresql://$1@$POSTGRES/$1" |
    grep -qx t
}

export PGPASSWORD="$ARCHSEARCH_DB_PASSWORD"
url=postgresql+psycopg://archsearch@$POSTGRES/archsearch
archsearch status --storage "$url" # upgrades what it opens
if has archsearch studies; then
  optuna storage upgrade --storage "$url"
else
  optuna studies --storage "$url" # makes what it does not find
fi

export PGPASSWORD="$MLFLOW_DB_PASSWORD"
if has mlflow alembic_version; then # its server makes what is not there yet
  mlflow db upgrade "postgresql+psycopg://mlflow@$POSTGRES/mlflow"
fi

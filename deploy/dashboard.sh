#!/bin/sh
# nginx in front of optuna-dashboard: asks for the name `archsearch` and the password in
# DASHBOARD_PASSWORD, and lets nobody write, because the database has one writer.
set -eu
umask 077
printf 'archsearch:{PLAIN}%s\n' "$DASHBOARD_PASSWORD" > /tmp/dashboard.htpasswd
exec nginx -c "$(dirname "$0")/nginx.conf"

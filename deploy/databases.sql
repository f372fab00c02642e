-- Two roles, each the owner of one database that nobody else may enter. Safe to run again.
\getenv archsearch_password ARCHSEARCH_DB_PASSWORD
\getenv mlflow_password MLFLOW_DB_PASSWORD

SELECT format('CREATE ROLE %I LOGIN', role)
FROM (VALUES ('archsearch'), ('mlflow')) AS wanted (role)
WHERE role NOT IN (SELECT rolname FROM pg_roles) \gexec

ALTER ROLE archsearch PASSWORD :'archsearch_password';
ALTER ROLE mlflow PASSWORD :'mlflow_password';

SELECT format('CREATE DATABASE %I OWNER %I', role, role)
FROM (VALUES ('archsearch'), ('mlflow')) AS wanted (role)
WHERE role NOT IN (SELECT datname FROM pg_database) \gexec

REVOKE CONNECT ON DATABASE archsearch, mlflow FROM PUBLIC;

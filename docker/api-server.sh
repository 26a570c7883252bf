#!/bin/sh
# Airflow's API server and UI, with the password of its one user from the environment.
set -eu
umask 077
python - <<'PYTHON'
import json, os, pathlib

passwords = pathlib.Path(os.environ["AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE"])
passwords.write_text(json.dumps({"admin": os.environ["AIRFLOW_ADMIN_PASSWORD"]}))
PYTHON
unset AIRFLOW_ADMIN_PASSWORD
exec airflow api-server
